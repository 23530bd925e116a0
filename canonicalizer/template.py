"""A model's chat template: messages to prompt text.

Owns the jinja2 environment (the one Hugging Face documents for chat templates: sandboxed, `tojson` without
escapes, `raise_exception`, `strftime_now`, loop controls, the `generation` tag) and the probe that says how a
conversation's text grows. What must hold: rendering is a pure function of its arguments. The date that
`strftime_now` sees is given at construction and never moves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from canonicalizer.messages import Message, TemplateError, foldings, normalize

__all__ = ["FROZEN_DATE", "ChatTemplate", "TemplateClass", "TemplateError"]

TemplateClass = Literal["append-only", "generation-prompt", "unstable"]
FROZEN_DATE = datetime(2024, 7, 26)  # the date that Llama 3's own template falls back to

_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"word": "probe"}'},
}
_SYSTEM: Message = {"role": "system", "content": "Answer in one word."}
_PLAIN: tuple[Message, ...] = (
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "Reply one."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Reply two."},
    {"role": "user", "content": "Third question?"},
)
_WITH_TOOL_RESULT: tuple[Message, ...] = (
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "lookup", "content": "A small test."},
    {"role": "assistant", "content": "It is a small test."},
    {"role": "user", "content": "Thanks."},
)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _compile(source: str, date: datetime) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = date.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error


class ChatTemplate:
    """A compiled chat template with its special-token strings; `template_class` says how its text grows.

    * append-only: the next turn's prompt starts with this prompt and the reply as it was generated;
    * generation-prompt: it starts with this prompt less its generation prompt (the reply is recomputed);
    * unstable: earlier turns are rendered differently later on.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        date: datetime = FROZEN_DATE,
    ) -> None:
        """Compile `source`; `special_tokens` maps names as templates use them (bos_token ...) to their text.

        Raises `TemplateError` for a syntax error.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._compiled = _compile(source, date)
        self._developer_role = "developer" if "developer" in source else "system"
        self._arguments_as_objects = self._reads_arguments_as_objects()
        self.template_class: TemplateClass = self._probe()

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The messages as this template wants them, content always a string; raises `TemplateError`."""
        return normalize(
            messages, developer_role=self._developer_role, arguments_as_objects=self._arguments_as_objects
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of OpenAI chat messages; `extra` are further template variables.

        Raises `TemplateError` with the template's own reason when no order of the messages is accepted.
        """
        return self.render_prepared(
            self.prepare(messages), tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
        )

    def render_prepared(
        self,
        prepared: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """`render` for messages that came from `prepare`: the given order first, then the foldings."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **(extra or {}),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._text(prepared, variables)
        except TemplateError as refusal:
            for attempt in foldings(prepared):
                try:
                    return self._text(attempt, variables)
                except TemplateError:
                    continue
            raise refusal

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._compiled.render(variables, messages=messages)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("the messages or tools are nested too deeply") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise TemplateError(f"the chat template failed on the messages: {error}") from error

    def _reads_arguments_as_objects(self) -> bool:
        """Whether tool-call arguments given as an object come out as JSON, not as Python's own notation."""
        call = {**_CALL, "function": {"name": "lookup", "arguments": {"word": "probe"}}}
        messages = [_WITH_TOOL_RESULT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        variables = {**self._special_tokens, "tools": [_TOOL], "add_generation_prompt": False}
        try:
            text = self._text(messages, variables)
        except TemplateError:
            return False
        return "{'word'" not in text

    def _probe(self) -> TemplateClass:
        """The worst class over plain turns, tools and a tool result; what is refused isn't counted."""
        classes = [
            self._growth(conversation, tools)
            for conversation in (_PLAIN, (_SYSTEM, *_PLAIN))
            for tools in (None, [_TOOL])
        ]
        classes.append(self._growth(_WITH_TOOL_RESULT, [_TOOL]))
        order: tuple[TemplateClass, ...] = ("unstable", "generation-prompt", "append-only")
        return next((name for name in order if name in classes), "unstable")

    def _growth(self, turns: Sequence[Message], tools: list[dict[str, Any]] | None) -> TemplateClass | None:
        worst: TemplateClass = "append-only"
        replies = [at for at, item in enumerate(turns) if item["role"] == "assistant" and item["content"]]
        try:
            for at in replies:
                before = self.render(turns[:at], tools=tools)
                closed = self.render(turns[:at], tools=tools, add_generation_prompt=False)
                for end in range(at + 2, len(turns) + 1):
                    later = self.render(turns[:end], tools=tools)
                    if later.startswith(before + turns[at]["content"]):
                        continue
                    if not later.startswith(closed):
                        return "unstable"
                    worst = "generation-prompt"
        except TemplateError:
            return None
        return worst
