"""The byte-level alphabet and the texts that tokenizers are probed with."""

from tokenizers.pre_tokenizers import ByteLevel

from canonicalizer.token_text import BYTE_OF_CHARACTER, TokenBytes, probe_texts, uses_byte_level


class Vocabulary:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def id_to_token(self, id: int) -> str | None:
        return self.tokens[id] if id < len(self.tokens) else None


def test_the_alphabet_is_the_one_of_tokenizers_and_one_to_one() -> None:
    assert set(BYTE_OF_CHARACTER) == set(ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert [BYTE_OF_CHARACTER[character] for character in "AĠĊ"] == [0x41, 0x20, 0x0A]


def test_bytes_of_tokens() -> None:
    tokens = TokenBytes(Vocabulary(["Ġa", "ðŁ", "日本", "<|é|>"]), {3: "<|é|>"})
    assert tokens.of(0) == b" a"
    assert tokens.of(1) == b"\xf0\x9f"
    assert tokens.of(2) == "日本".encode()
    assert tokens.of(3) == "<|é|>".encode()
    assert tokens.of(9) == b"" and tokens.of(-1) == b"" and tokens.of(1 << 40) == b""
    assert tokens.of(0) == b" a"


def test_byte_level_is_recognised_alone_and_in_a_sequence() -> None:
    assert uses_byte_level({"decoder": {"type": "ByteLevel"}})
    assert uses_byte_level(
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}}
    )
    assert not uses_byte_level({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}})
    assert not uses_byte_level({"decoder": None})


def test_a_few_hundred_probe_texts_hold_every_special_token() -> None:
    texts = list(probe_texts(["<a>", "<b>", "<c>"]))
    assert 300 <= len(set(texts)) <= 1000
    assert all(any(special in text for text in texts) for special in ("<a>", "<b>", "<c>"))
    assert list(probe_texts([])) == []
