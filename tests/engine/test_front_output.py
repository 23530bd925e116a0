"""A choice's text: stop tokens, stop strings, split characters, log probabilities held with it."""

from __future__ import annotations

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.tokens import TextModel, bytes_to_ids
from engine.core.sequence import FinishReason, TokenLogprob, TokenOutput
from engine.worker.front.bytemodel import END_ID
from engine.worker.front.logprobs import FLOOR, chat_entry, completion_logprobs, token_text
from engine.worker.front.output import ChoiceOutput, Entry, Piece
from engine.worker.front.text_files import load_text_model

MODEL: TextModel = load_text_model("")


def ids(text: str) -> list[int]:
    return bytes_to_ids(MODEL.encode_text(text))


def choice(*stops: str, min_tokens: int = 0, logprobs: bool = False) -> ChoiceOutput:
    return ChoiceOutput(
        Detokenizer(MODEL), stops, frozenset({END_ID}), min_tokens=min_tokens, wants_logprobs=logprobs
    )


def feed(output: ChoiceOutput, tokens: list[int], finish: FinishReason | None = "length") -> list[Piece]:
    pieces = []
    for position, token in enumerate(tokens):
        last = position == len(tokens) - 1
        pieces.append(
            output.push(
                TokenOutput("r", token, finish if last else None, TokenLogprob(-0.5, ((token, -0.5),)))
            )
        )
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_character_of_several_tokens_is_sent_whole() -> None:
    pieces = feed(choice(), ids("漢a🦔"))
    assert joined(pieces) == "漢a🦔"
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.text for piece in pieces[:3]] == ["", "", "漢"]


def test_an_unfinished_character_at_the_end_is_shown_once() -> None:
    assert joined(feed(choice(), ids("漢")[:2])) == "\ufffd"


def test_the_stop_token_is_counted_and_is_no_text() -> None:
    output = choice(logprobs=True)
    pieces = feed(output, [*ids("ab"), END_ID], "stop")
    assert joined(pieces) == "ab"
    assert output.completion_tokens == 3
    assert pieces[-1].finish_reason == "stop"
    assert [entry.token_id for piece in pieces for entry in piece.entries] == ids("ab")


def test_a_stop_string_ends_the_choice_before_it() -> None:
    output = choice("llo w")
    pieces = feed(output, ids("hello world"))
    assert joined(pieces) == "he"
    assert (output.finish_reason, output.completion_tokens, output.stopped_by_text) == ("stop", 7, True)


def test_held_text_is_released_at_the_end() -> None:
    assert joined(feed(choice("lox"), ids("hello"))) == "hello"


def test_stop_strings_wait_for_min_tokens() -> None:
    assert joined(feed(choice("a", min_tokens=3), ids("abcad"))) == "abc"


def test_entries_come_with_their_text_and_are_cut_with_it() -> None:
    pieces = feed(choice("llo", logprobs=True), ids("hello"))
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [entry.token_id for entry in entries] == ids("he")
    assert [len(piece.entries) for piece in pieces] == [1, 1, 0, 0, 0]
    assert [entry.offset for entry in entries] == [0, 1]


def test_entries_of_a_split_character_come_with_the_character() -> None:
    pieces = feed(choice(logprobs=True), ids("漢"))
    assert [len(piece.entries) for piece in pieces] == [0, 0, 3]


def test_an_end_without_a_token_is_no_token() -> None:
    output = choice()
    assert output.push(TokenOutput("r", None, "length")) == Piece("", (), "length")
    assert output.completion_tokens == 0


def test_tokens_are_shown_as_text_or_escaped_bytes() -> None:
    first, *_ = ids("漢")
    assert token_text(MODEL, first) == "\\xe6"
    assert token_text(MODEL, ids(" ")[0]) == " "


def test_the_chat_shape_of_log_probabilities() -> None:
    first, *_ = ids("漢")
    shown = chat_entry(MODEL, Entry(ids("a")[0], -0.5, ((first, float("-inf")), (END_ID, -2.0)), 0))
    assert (shown["token"], shown["bytes"], shown["logprob"]) == ("a", [97], -0.5)
    assert shown["top_logprobs"] == [
        {"token": "\\xe6", "logprob": FLOOR, "bytes": [0xE6]},
        {"token": "<|im_end|>", "logprob": -2.0, "bytes": []},
    ]


def test_the_legacy_shape_of_log_probabilities() -> None:
    a, b = ids("ab")
    shown = completion_logprobs(MODEL, [Entry(a, None, (), 0), Entry(b, -0.5, ((a, -0.1),), 1)])
    assert shown == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"a": -0.1, "b": -0.5}],
        "text_offset": [0, 1],
    }
