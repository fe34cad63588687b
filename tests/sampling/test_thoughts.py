"""Thoughts end after as many tokens as a request says."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from rows import encode, make_request, make_row

from paged_sdk.chat.thoughts import ThoughtLimit, ThoughtMarks
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.sampling.thoughts import ThoughtEndState

MARKS = ThoughtMarks("<", ">>")
CLOSING = tuple(b">>")


def limit(num_tokens: int, *, is_open: bool = False) -> ThoughtLimit:
    return ThoughtLimit(MARKS, num_tokens, CLOSING, is_open, bytes)


def forced(text: bytes, num_tokens: int, *, is_open: bool = False) -> bytes:
    """Return what is forced after a text, token by token, until nothing is."""
    state = ThoughtEndState(limit(num_tokens, is_open=is_open), list(text))
    data = b""
    while (change := state.change()) is not None:
        data += bytes(change.tolist())
        state.advance(change.tolist())
    return data


@pytest.mark.parametrize(
    ("text", "num_tokens", "is_open", "expected"),
    [
        (b"<abc", 4, False, b">>"),
        (b" <bc", 4, False, b">>"),
        (b"abcd", 4, True, b">>"),
        (b"<ab", 4, False, b""),  # too early
        (b"abcd", 4, False, b""),  # it does not think
        (b"<a>>", 4, False, b""),  # it has ended
        (b"<ab>>", 4, False, b">"),  # half of the mark came in time, and the other half is forced first
        (b"<abcde", 4, False, b""),  # too late
        (b"<ab\xc3", 4, False, b""),  # within a character
        (b"<ab\xc3\xa9", 4, False, b">>"),
        (b"<ab\xf0\x9f\x98", 4, False, b""),
        (b"<ab\xf0\x9f\x98\x80", 4, False, b">>"),
        (b"<ab\xc3" * 3, 4, False, b""),  # no character, and it has gone on: too late
        (b"<ab" + b"\xc3" * 9, 4, False, b">>"),  # characters that do not end are not waited for
    ],
)
def test_what_is_forced(text: bytes, num_tokens: int, is_open: bool, expected: bytes) -> None:
    assert forced(text, num_tokens, is_open=is_open) == expected


def test_drafts_are_taken_back() -> None:
    """After any calls a state says what a new one of the same tokens does."""
    state = ThoughtEndState(limit(4), [])
    steps = ((b"<a", 0), (b"bcd", 1), (b">", 0), (b">x", 2), (b"", 4), (b"a>>", 0), (b"", 5), (b"abcde", 1))
    for add, take in (*steps, (b"", 3), (b"\xc3", 0), (b"\xa9", 1), (b"a>", 2)):
        state.advance(list(add))
        state.roll_back(take)
        fresh = ThoughtEndState(limit(4), list(state.fork()._token_ids))
        one, other = state.change(), fresh.change()
        assert (None if one is None else one.tolist()) == (None if other is None else other.tolist())


def test_the_sampler_obeys() -> None:
    request = evolve(make_request(SamplingParams(temperature=1.0, seed=1)), thought_limit=limit(3, is_open=True))
    sampler = Sampler(256, torch.device("cpu"), default_processors(256, encode))
    output: list[int] = []
    logits = torch.zeros(1, 256)
    logits[0, ord(">")] = -100.0
    for _ in range(8):
        rows = [make_row(request, output)]
        output += sampler.sample(logits.clone(), sampler.prepare(rows)).token_ids[0]
    assert bytes(output[3:5]) == b">>"
    assert ord(">") not in output[:3] + output[5:]
