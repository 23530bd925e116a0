"""Chat templates: rendering, message forms, refused orders, and how a conversation's text grows."""

import json
from datetime import datetime
from typing import Any

import pytest

from canonicalizer.messages import TemplateError, foldings
from canonicalizer.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}[{{ m.role }}:{{ m.content }}]
{%- endfor -%}{% if add_generation_prompt %}[assistant:{% endif %}"""
ALTERNATING = """{{ bos_token }}{% if messages[0].role == 'system' %}
{% set turns = messages[1:] %}[system:{{ messages[0].content }}]
{%- else %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}
{%- if add_generation_prompt %}[assistant:{% endif %}"""
NO_SYSTEM = """{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if loop.index0 % 2 == 0 and m.role != 'user' %}{{ raise_exception('alternate') }}{% endif %}
[{{ m.role }}:{{ m.content }}]{% endfor %}"""
TOOLS = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>
{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}]
{% endfor %}{% if add_generation_prompt %}[assistant:{% endif %}"""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_an_empty_assistant_turn_stays_a_turn() -> None:
    text = ChatTemplate(CHATML).render([user("one"), assistant(""), user("two")])
    assert text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_null_absent_and_empty_content_are_the_same() -> None:
    template = ChatTemplate(TOOLS)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":6,"b":7}'}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    texts = {template.render([user("6+7?"), turn, {"role": "tool", "content": "13"}]) for turn in turns}
    assert len(texts) == 1
    assert '<call>{"name": "add", "arguments": {"a": 6, "b": 7}}</call>' in texts.pop()


def test_parts_are_joined_with_nothing_between() -> None:
    template = ChatTemplate(CHATML)
    parts = [{"type": "text", "text": "4.2 "}, {"type": "input_text", "text": "met"}, "res"]
    for role in ("system", "user", "assistant", "tool"):
        joined = template.render([{"role": role, "content": "4.2 metres"}])
        assert template.render([{"role": role, "content": parts}]) == joined
    assert "I can't" in template.render([assistant([{"type": "refusal", "refusal": "I can't"}])])
    assert template.render([user([])]) == template.render([user("")])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [user([{"type": "image_url", "image_url": {"url": "x"}}])],
            r"messages\[0\].content\[0\].*'image_url'",
        ),
        ([user("x"), user([{"type": "text", "text": None}])], r"messages\[1\].content\[0\]"),
        ([user([7])], r"messages\[0\].content\[0\]"),
        ([user(7)], r"messages\[0\].content: expected a string or a list of parts, not int"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([user("x"), "y"], r"messages\[1\]: expected an object, not str"),
    ],
)
def test_a_bad_field_is_named(messages: list[Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        ChatTemplate(CHATML).render(messages)


def test_later_system_messages_keep_their_place_where_the_template_allows() -> None:
    messages = [system("A"), user("Hey"), assistant("Hi."), system("Only GREEN."), user("Colour?")]
    text = ChatTemplate(CHATML).render(messages)
    assert text.index("Hi.") < text.index("system\nOnly GREEN.") < text.index("Colour?")


def test_later_system_messages_fold_only_where_the_template_refuses_them() -> None:
    template = ChatTemplate(STRICT)
    messages = [system("A"), user("Hey"), assistant("Hi."), system("B1"), system("B2"), user("Colour?")]
    text = template.render(messages)
    assert text == "[system:A][user:Hey][assistant:Hi.][user:B1\n\nB2\n\nColour?][assistant:"
    assert text.startswith(template.render(messages[:3], add_generation_prompt=False))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([system("A"), user("x"), system("B")], "[system:A][user:x\n\nB][assistant:"),
        ([user("x"), assistant("y"), system("B")], "[user:x][assistant:y][user:B][assistant:"),
        ([user("x"), system("B"), assistant("y")], "[user:x\n\nB][assistant:y][assistant:"),
        ([system("A"), user("x"), system(""), user("y")], "[system:A][user:x][user:y][assistant:"),
    ],
)
def test_folding_finds_a_user_turn_nearby(messages: list[dict[str, Any]], text: str) -> None:
    assert ChatTemplate(STRICT).render(messages) == text


def test_neighbours_merge_where_roles_must_alternate() -> None:
    template = ChatTemplate(ALTERNATING, {"bos_token": "<s>"})
    assert template.render([user("a"), user("b"), assistant("c"), assistant("d"), user("e")]) == (
        "<s>[user:a\n\nb][assistant:c\n\nd][user:e][assistant:"
    )
    assert template.render([system("A"), system("B"), user("x")]) == "<s>[system:A\n\nB][user:x][assistant:"


def test_a_template_without_system_role_gets_it_in_the_first_user_message() -> None:
    text = ChatTemplate(NO_SYSTEM).render([system("A"), user("x"), assistant("y"), system("B"), user("z")])
    assert text == "[user:A\n\nx][assistant:y][user:B\n\nz]"


def test_tool_turns_are_never_merged() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [assistant("", tool_calls=[call]), assistant("x"), {"role": "tool", "content": "1"}]
    messages.append({"role": "tool", "content": "2"})
    assert list(foldings(messages)) == []


def test_the_first_refusal_is_reported_when_nothing_helps() -> None:
    template = ChatTemplate("{{ raise_exception('never: ' ~ messages[0].content) }}")
    with pytest.raises(TemplateError, match="refused the messages: never: one"):
        template.render([user("one"), system("two")])
    assert template.template_class == "unstable"


def test_an_error_inside_the_template_is_a_template_error() -> None:
    with pytest.raises(TemplateError, match="failed on the messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([user("x")])


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TemplateError, match="chat template, line 2"):
        ChatTemplate("a\n{% if %}")


def test_the_template_can_neither_reach_out_nor_change_messages() -> None:
    messages = [user("x")]
    for source in ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "{% set _ = messages.clear() %}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(messages)
    assert messages == [user("x")]


def test_the_extras_that_chat_templates_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "|{{ {'k': 'é<'} | tojson }}|{{ [1] | tojson(indent=1) }}|{{ strftime_now('%d %b %Y') }}|{{ mood }}"
    )
    template = ChatTemplate(source, date=datetime(2030, 1, 2))
    text = template.render([user("one"), user("two")], extra={"mood": "calm"})
    assert text == 'one|{"k": "é<"}|[\n 1\n]|02 Jan 2030|calm'


@pytest.mark.parametrize(("source", "role"), [(CHATML, "system"), (CHATML + "{# developer #}", "developer")])
def test_developer_becomes_system_unless_the_template_knows_it(source: str, role: str) -> None:
    assert f"<|im_start|>{role}\nx" in ChatTemplate(source).render([{"role": "developer", "content": "x"}])


def test_arguments_become_objects_only_where_json_and_where_the_template_prints_json() -> None:
    def calls(*arguments: object) -> list[dict[str, Any]]:
        functions = [{"function": {"name": "f", "arguments": value}} for value in arguments]
        return [user("x"), assistant("", tool_calls=[*functions, {"id": "bare"}, "odd"])]

    odd = calls('{"a": 1}', "[1]", "{broken", {"b": 2})
    prepared = ChatTemplate(TOOLS).prepare(odd)[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in prepared[:4]] == [{"a": 1}, "[1]", "{broken", {"b": 2}]
    assert prepared[4:] == [{"id": "bare"}, "odd"]
    raw = ChatTemplate(TOOLS.replace("c.function | tojson", "c.function.arguments"))
    text = raw.render(
        calls('{"a":1.10}')[:1] + [assistant("", tool_calls=calls('{"a":1.10}')[1]["tool_calls"][:1])]
    )
    assert '<call>{"a":1.10}</call>' in text


def test_growth_classes() -> None:
    strip_thoughts = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}[assistant:<think>{% endif %}"
    )
    first_differs = "{% for m in messages %}{{ messages | length }}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert ChatTemplate(CHATML).template_class == "append-only"
    assert ChatTemplate(STRICT).template_class == "append-only"
    assert ChatTemplate(TOOLS).template_class == "append-only"
    assert ChatTemplate(strip_thoughts).template_class == "generation-prompt"
    assert ChatTemplate(first_differs).template_class == "unstable"


def test_tools_reach_the_template_in_their_own_order() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}
    text = ChatTemplate(TOOLS).render([user("x")], tools=[tool])
    assert f"<tools>{json.dumps(tool)}</tools>" in text
    assert "<tools>" not in ChatTemplate(TOOLS).render([user("x")], tools=[])
