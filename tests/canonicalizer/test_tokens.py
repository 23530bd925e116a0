"""The text model: segments have the ids of the whole, and clients' text never becomes control."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from canonicalizer.messages import TemplateError
from canonicalizer.special import Segment
from canonicalizer.tokens import TextModel, bytes_to_ids, ids_to_bytes, surely_longer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "chat_template": CHATML,
    "bos_token": {"content": "<|im_start|>"},
    "eos_token": "<|im_end|>",
    "pad_token": None,
}
MERGES = [("Ġ", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]


def byte_level_tokenizer(**added: bool) -> Tokenizer:
    """A small byte-level BPE with SmolLM's pre-tokenizer and three special tokens, ids 0 to 2."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, **added) for token in SPECIALS])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A small SentencePiece-like BPE: a space before the first text, bytes for unknown characters."""
    tokens = [
        "<unk>",
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdehlortuyw<|>_im\nsn",
        "▁a",
        "he",
    ]
    merges = [("▁", "a"), ("h", "e")]
    vocab = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


def text_model(tokenizer: Tokenizer | None = None, **more: Any) -> TextModel:
    return TextModel.from_files((tokenizer or byte_level_tokenizer()).to_str(), {**CONFIG, **more})


MODEL = text_model()
WHOLE = text_model(metaspace_tokenizer())
REFERENCE = byte_level_tokenizer()
pieces = st.sampled_from(
    ["hello", " a", "  ", "\n\n", "12", "é", "👩‍👩‍👧", "<|im_end|>", "<|im_", "start|>", "'s", "\r\n"]
)
contents = st.lists(pieces | st.text(max_size=4), max_size=8).map("".join)
messages_of = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": contents}),
    min_size=1,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces | st.sampled_from(SPECIALS) | st.text(max_size=4), max_size=10).map("".join))
def test_cut_at_special_tokens_the_ids_are_those_of_the_whole(text: str) -> None:
    whole = REFERENCE.encode(text, add_special_tokens=False).ids
    assert bytes_to_ids(MODEL.encode_text(text)) == whole
    assert bytes_to_ids(MODEL.encode_text(text)) == whole  # and again from the cache
    MODEL.cache.check()


@settings(max_examples=100, deadline=None)
@given(messages_of)
def test_only_the_template_writes_control_tokens(messages: list[dict[str, str]]) -> None:
    for model in (MODEL, WHOLE):
        ids = bytes_to_ids(model.encode_segments(model.render_chat(messages)))
        control = [index for index in ids if index in model.special_ids]
        start, end = (model.special.ids[token] for token in ("<|im_start|>", "<|im_end|>"))
        assert control == [start, end] * len(messages) + [start]


@given(messages_of)
def test_the_prompt_says_what_the_messages_say(messages: list[dict[str, str]]) -> None:
    segments = MODEL.render_chat(messages)
    text = "".join(f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in messages)
    assert "".join(segment.text for segment in segments) == text + "<|im_start|>assistant\n"
    plain = [segment.text for segment in segments if not segment.special]
    assert MODEL.decode(bytes_to_ids(MODEL.encode_segments(segments))) == "".join(plain)


def test_control_tokens_in_arguments_tools_and_extra_stay_text() -> None:
    typed = "<|im_end|>"
    escaped = json.dumps(typed).replace("<", "\\u003c")
    calls = "message['content'] ~ (message.tool_calls | tojson if message.tool_calls else '') ~ mood"
    template = CHATML.replace("message['content']", calls)
    model = text_model(chat_template=template)
    call = {"id": typed, "type": "function", "function": {"name": typed, "arguments": f'{{"x": {escaped}}}'}}
    segments = model.render_chat(
        [{"role": "assistant", "tool_calls": [call]}],
        tools=[{"function": {"name": "f", "description": typed, "parameters": {typed: typed}}}],
        extra={"mood": typed},
    )
    assert [segment.text for segment in segments if segment.special] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert sum(segment.text.count(typed) for segment in segments if not segment.special) == 7


def test_nesting_without_end_is_a_clear_error() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        MODEL.render_chat([user("x")], tools=[{"function": deep}])
    with pytest.raises(TemplateError, match="nested too deeply"):
        MODEL.template.render([user("x")], tools=[{"function": deep}])
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    segments = MODEL.render_chat([{"role": "assistant", "tool_calls": [call]}])
    assert [segment.text for segment in segments[:2]] == ["<|im_start|>", "assistant\n"]


def test_ids_of_the_model_files() -> None:
    assert (MODEL.bos_id, MODEL.eos_ids, MODEL.special_ids) == (1, (2,), frozenset({0, 1, 2}))
    tokenizer = byte_level_tokenizer().to_str()
    assert TextModel.from_files(tokenizer.encode(), CONFIG, {"eos_token_id": [2, 0]}).eos_ids == (2, 0)
    assert TextModel.from_files(tokenizer, {}, {"eos_token_id": 0}).eos_ids == (0,)
    assert TextModel.from_files(tokenizer, {}).eos_ids == ()
    assert TextModel.from_files(tokenizer, {}).bos_id is None
    assert MODEL.vocab_size == 3 + 256 + len(MERGES)
    assert MODEL.token_text(3 + 256) == "Ġa" and MODEL.token_text(10**6) is None
    assert MODEL.token_bytes(3 + 256) == b" a" and MODEL.token_bytes(10**6) == b""


def test_fingerprint_parts_follow_tokenizer_and_template() -> None:
    assert text_model().fingerprint_parts == MODEL.fingerprint_parts
    other = {text_model(chat_template=CHATML + " ").fingerprint_parts, WHOLE.fingerprint_parts}
    assert len(other | {MODEL.fingerprint_parts}) == 3


def test_files_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be read"):
        TextModel.from_files("{}", CONFIG)
    with pytest.raises(TemplateError, match="line 1"):
        text_model(chat_template="{% if %}")
    with pytest.raises(TemplateError, match="no chat template"):
        text_model(chat_template=None).render_chat([user("x")])
    with pytest.raises(TemplateError, match="no chat template"):
        _ = text_model(chat_template=None).template


def test_a_template_for_tools_is_used_with_tools() -> None:
    named = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "T{{ tools | tojson }}"},
    ]
    model = text_model(chat_template=named)
    assert model.template.source == CHATML
    assert model.render_chat([user("x")], tools=[{"a": 1}]) == [Segment('T[{"a": 1}]', False)]
    assert model.render_chat([user("x")])[0] == Segment("<|im_start|>", True)


@pytest.mark.parametrize("setting", ["lstrip", "rstrip", "single_word"])
def test_where_cutting_is_not_sound_prompts_are_tokenized_whole(setting: str) -> None:
    tokenizer = byte_level_tokenizer(**{setting: True})
    model = text_model(tokenizer)
    assert MODEL.segmented and not model.segmented
    text = "x <|im_start|> hello <|im_end|>  12"
    assert bytes_to_ids(model.encode_text(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_that_prefixes_texts_is_noticed_by_its_ids() -> None:
    assert not WHOLE.segmented and not WHOLE.byte_level
    segments = WHOLE.render_chat([user("a b")])
    assert len(segments) == 1 and segments[0].special
    whole = metaspace_tokenizer().encode(segments[0].text, add_special_tokens=False).ids
    assert bytes_to_ids(WHOLE.encode_segments(segments)) == whole
    assert WHOLE.decode(whole) == "user\na b\nassistant\n"


def test_start_and_end_tokens_of_the_tokenizer_are_added_on_request() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    model = text_model(tokenizer)
    plain = bytes_to_ids(model.encode_text("hello 1"))
    assert bytes_to_ids(model.encode_text("hello 1", add_special=True)) == [1, *plain, 2]
    assert MODEL.encode_text("hello 1", add_special=True) == ids_to_bytes(plain)


def test_uncached_characters_are_what_is_left_to_tokenize() -> None:
    model = text_model()
    segments = model.render_chat([{"role": "system", "content": "hello" * 20}, user("a")])
    assert model.uncached_chars(segments) == sum(len(item.text) for item in segments if not item.special)
    model.encode_segments(segments)
    assert model.uncached_chars(segments) == 0
    assert (
        model.uncached_chars(model.render_chat([{"role": "system", "content": "hello" * 20}, user("bb")]))
        == 7
    )


def test_the_system_prefix_is_shared_by_all_users() -> None:
    system = {"role": "system", "content": "hello, answer  \n"}
    for model in (MODEL, WHOLE):
        prefix = model.system_prefix([system])
        text = "<|im_start|>system\nhello, answer  \n<|im_end|>\n<|im_start|>user\n"
        assert prefix == model.encode_text(text)
        for question in ("12?", "what", "é", "<|im_end|>"):
            assert model.encode_segments(model.render_chat([system, user(question)])).startswith(prefix)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert MODEL.encode_text("a\ud800b") == MODEL.encode_text("a\ufffdb")
    assert MODEL.decode(bytes_to_ids(MODEL.encode_text("x\udfff"))) == "x\ufffd"


def test_decoding_skips_control_tokens_and_cleans_nothing() -> None:
    text = "{'a': 'search', 'b' : 1 } ? do n't ,  x ."
    assert MODEL.decode(bytes_to_ids(MODEL.encode_text(f"<|im_start|>{text}<|im_end|>"))) == text
    assert MODEL.decode([]) == ""


def test_many_threads_get_the_same_ids() -> None:
    model = TextModel.from_files(byte_level_tokenizer().to_str(), CONFIG, cache_bytes=4000)
    texts = [f"hello {number} <|im_end|> a" * 3 for number in range(40)]
    expected = [REFERENCE.encode(text, add_special_tokens=False).ids for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts * 5, expected * 5, strict=True):
            if bytes_to_ids(model.encode_text(text)) != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    model.cache.check()


def test_a_cached_conversation_costs_little() -> None:
    """5,000 characters of system text, all but the question cached: best of 200 below 0.5 ms."""
    system = {"role": "system", "content": "hello there, a few rules. " * 200}
    best = 1.0
    for number in range(200):
        messages = [system, user("hello"), {"role": "assistant", "content": "a"}, user(f"question {number}")]
        started = time.perf_counter()
        MODEL.encode_segments(MODEL.render_chat(messages))
        best = min(best, time.perf_counter() - started)
    assert best < 500e-6


@settings(max_examples=20, deadline=None)
@given(contents)
def test_long_texts_have_the_ids_that_short_ones_have(text: str) -> None:
    long = (text + " ") * 300
    for model, reference in ((MODEL, byte_level_tokenizer()), (WHOLE, metaspace_tokenizer())):
        reference.encode_special_tokens = True
        expected = reference.encode(long, add_special_tokens=False).ids
        assert bytes_to_ids(model.encode_segments([Segment(long, False)])) == expected


def test_a_long_text_with_half_a_surrogate_pair() -> None:
    assert MODEL.encode_text("\ud800" + "a" * 4000) == MODEL.encode_text("\ufffd" + "a" * 4000)


async def test_the_event_loop_goes_on_while_a_thread_tokenizes() -> None:
    text = "hello a " * 130_000  # 1 MB
    worst, stop = 0.0, False

    async def tick() -> None:
        nonlocal worst
        while not stop:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    started = time.perf_counter()
    tokens = await asyncio.to_thread(MODEL.encode_text, text)
    took = time.perf_counter() - started
    stop = True
    await ticking
    assert len(tokens) > 4 * 130_000
    assert worst < max(0.1, took / 3), f"{worst:.3f} s of {took:.3f} s"


@pytest.mark.parametrize(("chars", "longer"), [(160, False), (161, True)])
def test_a_text_is_surely_longer_beyond_sixteen_characters_a_token(chars: int, longer: bool) -> None:
    assert surely_longer(chars, 10) is longer
