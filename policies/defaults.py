"""What holds when a policy says nothing: the built-in classes, rules and the policy of a first start.

Owns the texts and values of the defaults; the default policy is YAML and loaded like any other, so that
whatever a file may say, the default says in the same way. Must always hold: the default policy forwards every
request untouched (`observe`), and its rules name labels only, never a value.
"""

from __future__ import annotations

from typing import Any

from policies.model import PriorityClass

CLASSES: tuple[PriorityClass, ...] = (
    PriorityClass("system", rank=0, share=0.10, queue_limit=64, queue_timeout_s=30.0),
    PriorityClass("interactive", rank=1, share=0.50, queue_limit=256, queue_timeout_s=30.0),
    PriorityClass("standard", rank=2, share=0.25, queue_limit=256, queue_timeout_s=60.0),
    PriorityClass("batch", rank=3, share=0.15, queue_limit=1024, queue_timeout_s=600.0),
)

DEFAULT_SOURCE = "default-policy.yaml"

DEFAULT_POLICY_TEXT = """\
# The policy of a first start: no tenants, two bundled replicas; every request is forwarded as it came.
version: 1

pools:
  default:
    model: smollm2-135m-instruct
    bundled: {replicas: 2}

routes:
  - name: default
    class: interactive
    pool: default
    canon:
      mode: observe
      replay: true
      # What may move. The built-in rules name clocks (Current time, Date, Now, Timestamp, ...), ids (Request,
      # Session, Trace, Conversation and Correlation id) and user names (User, User name, Username), each
      # behind such a plain label at the start of a line or sentence. To move less, list your own instead:
      #   rules: [{label: "Current time", shape: clock, precision: minute}]
      # or keep the built-in ones and switch one off by its label:
      #   rules: [builtin, {label: "User", shape: name, mode: "off"}]
      rules: builtin
      learn: {accept: propose}
"""

_CLOCK_LABELS = (
    "Current time",
    "Current date",
    "Current date and time",
    "Current datetime",
    "Today's date",
    "Today",
    "Date",
    "Time",
    "Now",
    "Timestamp",
)
_ID_LABELS = ("Request id", "Session id", "Trace id", "Conversation id", "Correlation id")
_NAME_LABELS = ("User", "User name", "Username")


def builtin_rules() -> list[dict[str, Any]]:
    """The rules behind `rules: builtin`: clocks, request ids and user names that stand behind a plain
    label.
    """
    clocks: list[dict[str, Any]] = [
        {"label": label, "shape": "clock", "precision": "minute"} for label in _CLOCK_LABELS
    ]
    ids: list[dict[str, Any]] = [
        {"label": label, "shape": shape} for label in _ID_LABELS for shape in ("uuid", "hex")
    ]
    names: list[dict[str, Any]] = [{"label": label, "shape": "name"} for label in _NAME_LABELS]
    return clocks + ids + names
