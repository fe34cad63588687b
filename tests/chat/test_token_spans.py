"""Which characters of a text its tokens have a part in, whatever their bytes."""

from __future__ import annotations

import codecs
from itertools import accumulate
from typing import Final, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paged_sdk.chat.output_bytes import OutputBytes
from paged_sdk.chat.token_spans import TextTokens, TokenSpans
from paged_sdk.chat.tokenizer import Tokenizer

NOTED: Final = "paged_sdk.tests.noted"


class Pieces:
    """Has tokens of any bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def decode_bytes(self, ids: tuple[int, ...], *, skip_special_tokens: bool, kept: frozenset[int]) -> bytes:
        return b"".join(self._pieces[id] for id in ids)


def spans_of(pieces: list[bytes], *, left_out: int = 0, strips: bool = False) -> list[tuple[int, int]]:
    tokenizer = cast(Tokenizer, Pieces(pieces))
    spans = TokenSpans(OutputBytes(tokenizer, kept=frozenset(), num_left_out=left_out, strips_space=strips))
    return [spans.add(token_id) for token_id in range(len(pieces))]


def characters_of(data: bytes) -> list[int]:
    """Return the character that each byte is part of, as decoding the whole data shows."""
    starts: list[int] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        starts.append(error.start)
        return "\ufffd", error.end

    codecs.register_error(NOTED, note)
    data.decode("utf-8", NOTED)
    is_first = [index in starts or not 0x80 <= byte < 0xC0 for index, byte in enumerate(data)]
    return [count - 1 for count in accumulate(is_first, initial=0)][1:]


@given(st.lists(st.binary(max_size=4) | st.text("aŁ🦩 ", max_size=3).map(str.encode), max_size=12))
@example([b"\xed", b"\xa0"])
@example([b"\xed\xa0", b"\x80", b"a"])
def test_tokens_have_a_part_in_the_characters_of_their_bytes(pieces: list[bytes]) -> None:
    characters = characters_of(b"".join(pieces))
    at = 0
    for piece, (begin, end) in zip(pieces, spans_of(pieces), strict=True):
        assert list(range(begin, end)) == sorted(set(characters[at : at + len(piece)]))
        at += len(piece)
    assert len(b"".join(pieces).decode("utf-8", "replace")) == max(characters, default=-1) + 1


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b" ", b"so"], [(0, 0), (0, 2)]),
        ([b" so", b" on"], [(0, 2), (2, 5)]),
        ([b"", b"so"], [(0, 0), (0, 2)]),
        ([b"\xc3", b"\xa9 "], [(0, 1), (0, 2)]),
    ],
)
def test_a_space_that_decoding_strips_has_no_token(pieces: list[bytes], expected: list[tuple[int, int]]) -> None:
    assert spans_of(pieces, strips=True) == expected


def test_bytes_that_repeat_the_prompt_have_no_characters() -> None:
    assert spans_of([b"ab", b"cd", b"", b"e"], left_out=3) == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_each_token_is_taken_once_with_the_first_text_that_it_is_part_of() -> None:
    pieces = [b"<a>", b"b", b"", b"c<d", b">e<", b"f>"]
    tokens = TextTokens[bytes](TokenSpans(OutputBytes(cast(Tokenizer, Pieces(pieces)), kept=frozenset())))
    tokens.add(range(6), pieces)
    assert tokens.take([]) == []
    assert tokens.take([(3, 4)]) == [b"b"]
    assert tokens.take([(4, 5), (8, 9)]) == [b"c<d", b">e<"]
    assert tokens.take([(12, 20)]) == []
