"""Incremental detokenization: the pieces are the whole, and no character is shown before it is finished."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.tokens import TextModel, bytes_to_ids


def byte_level() -> TextModel:
    """Tokens 0 `<end>`, 1 to 256 the bytes in order of their alphabet, 257 a token that is two scalars."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", *alphabet, "日本"]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    return TextModel.from_files(tokenizer.to_str(), {"eos_token": "<end>"})


def byte_fallback() -> TextModel:
    """SentencePiece-like: words with a leading space mark, and `<0xNN>` for bytes."""
    tokens = [
        "<unk>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "é",
        "▁a",
        "▁b",
        "n",
        "y",
    ]
    vocab = {token: at for at, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    return TextModel.from_files(tokenizer.to_str(), {"eos_token": "<end>"})


BYTES, FALLBACK = byte_level(), byte_fallback()
ID_OF_BYTE = {BYTES.token_bytes(token)[0]: token for token in range(1, 257)}
END = 0
ONE_OF_EACH = "Příliš žluťoučký 뙠 漢字 🦔 👩‍👩‍👧 🏳️‍🌈 n\u0303y 1\ufe0f\u20e3\r\n\tİ"


def streamed(model: TextModel, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(model)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("model", [BYTES, FALLBACK])
def test_split_characters_are_held_until_they_are_whole(model: TextModel) -> None:
    ids = bytes_to_ids(model.encode_text(ONE_OF_EACH))
    parts = streamed(model, ids)
    assert "".join(parts) == ONE_OF_EACH == model.decode(ids)
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""


def test_combining_marks_and_joiners_come_out_once_each() -> None:
    for model in (BYTES, FALLBACK):
        for text in ("n\u0303y", "\U0001f469\u200d\U0001f680"):
            ids = [token for scalar in text for token in bytes_to_ids(model.encode_text(scalar))]
            ids = [token for token in ids if model.token_text(token) != "▁"]
            assert "".join(streamed(model, ids)) == text


@given(st.binary(max_size=24))
def test_any_bytes_come_out_as_python_decodes_them(data: bytes) -> None:
    ids = [ID_OF_BYTE[byte] for byte in data]
    text = data.decode("utf-8", "replace")
    assert "".join(streamed(BYTES, ids)) == text == BYTES.decode(ids)
    fallback = [2 + byte for byte in data]
    assert "".join(streamed(FALLBACK, fallback)) == text == FALLBACK.decode(fallback)


@given(st.text(max_size=20), st.integers(0, 80))
def test_a_truncated_tail_is_replaced_only_at_the_end(text: str, cut: int) -> None:
    data = text.encode()[:cut]
    *pushed, rest = streamed(BYTES, [ID_OF_BYTE[byte] for byte in data])
    whole = data.decode("utf-8", "ignore")
    assert "".join(pushed) == whole
    assert rest == ("" if len(whole.encode()) == len(data) else "\ufffd")


def test_bytes_that_can_never_be_a_character_are_replaced_at_once() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(ID_OF_BYTE[byte]) for byte in (0xFF, 0xE6, 0x41)] == ["\ufffd", "", "\ufffdA"]
    assert detokenizer.flush() == ""


def test_special_and_unknown_tokens_are_skipped_even_inside_a_character() -> None:
    first, *others = (ID_OF_BYTE[byte] for byte in "漢".encode())
    assert "".join(streamed(BYTES, [END, first, END, 10**6, *others, END])) == "漢"
    assert BYTES.decode([END, first, END, *others, END]) == "漢"
    assert "".join(streamed(BYTES, [257])) == "日本"


def test_spaces_before_punctuation_stay() -> None:
    text = "{'a': 'search', 'b' : 1 } ?  do n't"
    assert "".join(streamed(BYTES, bytes_to_ids(BYTES.encode_text(text)))) == text


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "é", " a", " b", " ", "漢", "🦔", "n", "y"]), max_size=12).map(
        "".join
    )
)
def test_a_vocabulary_with_space_marks_streams_its_own_decoding(text: str) -> None:
    ids = bytes_to_ids(FALLBACK.encode_text(text))
    assert "".join(streamed(FALLBACK, ids)) == text == FALLBACK.decode_pieces(ids)


def test_text_after_bytes_keeps_its_space_and_ends_an_unfinished_character() -> None:
    after = bytes_to_ids(FALLBACK.encode_text("b"))
    word = next(token for token in after if FALLBACK.token_text(token) == "▁b")
    hedgehog = [2 + byte for byte in "🦔".encode()]
    assert "".join(streamed(FALLBACK, [*hedgehog, word, word])) == "🦔 b b"
    assert streamed(FALLBACK, [*hedgehog[:2], word]) == ["", "", "\ufffd b", ""]
    assert streamed(FALLBACK, [1, word, 1]) == ["", "b", "", ""]
