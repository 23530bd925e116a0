"""Message folding: nothing is lost and order is kept, whatever the messages."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from canonicalizer.messages import content_chars, fold_later_system, foldings, merge_neighbours, normalize

ROLES = ("system", "user", "assistant", "tool")
conversations = st.lists(st.sampled_from(ROLES), min_size=1, max_size=12).map(
    lambda roles: [{"role": role, "content": f"<{at}>"} for at, role in enumerate(roles)]
)


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["content"] for message in messages).replace("\n\n", "")


@given(conversations)
def test_every_folding_keeps_all_text_in_order(messages: list[dict[str, Any]]) -> None:
    before = [dict(message) for message in messages]
    for attempt in foldings(messages):
        assert text_of(attempt) == text_of(messages)
    assert messages == before


@given(conversations)
def test_after_folding_system_messages_are_only_leading(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in fold_later_system(messages)]
    leading = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    assert "system" not in roles[leading:]


@given(conversations)
def test_merging_leaves_no_equal_neighbours_but_tool_results(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in merge_neighbours(messages)]
    assert all(a != b or a == "tool" for a, b in zip(roles, roles[1:], strict=False))


@given(conversations)
def test_a_longer_conversation_folds_its_beginning_the_same(messages: list[dict[str, Any]]) -> None:
    """What was rendered for turn n stays the beginning of turn n + 1, but for its last message."""
    earlier = fold_later_system(messages)
    later = fold_later_system([*messages, {"role": "assistant", "content": "a"}])
    assert later[: len(earlier) - 1] == earlier[:-1]


def test_normalizing_copies_and_keeps_unknown_fields() -> None:
    message = {"role": "user", "content": None, "name": "ann", "x": [1]}
    (plain,) = normalize([message], developer_role="system", arguments_as_objects=True)
    assert plain == {"role": "user", "content": "", "name": "ann", "x": [1]}
    assert message["content"] is None


def test_the_characters_of_all_texts_are_counted() -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url"}, "de", 7]
    messages = [{"content": "xy"}, {"content": parts}, {"content": None}, {}, "no message"]
    assert content_chars(messages) == 7
    assert content_chars(None) == 0
