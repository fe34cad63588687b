"""The bytes that a healed prompt's text begins with, in whatever tokens."""

from __future__ import annotations

import torch
from attrs import evolve
from rows import encode, make_request, make_row

from paged_sdk.chat.token_healing import Healing, TokenPrefixes
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.healing import HealingState
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler

TOKENS = [b"", b"a", b"ab", b"b", b"abc", b"bc", b"cd", b"d", b"c"]
HEALING = Healing(b"ab", 1, TokenPrefixes(enumerate(TOKENS)))


def test_texts_begin_with_the_bytes_taken_back() -> None:
    texts = set()
    for seed in range(60):
        request = evolve(make_request(SamplingParams(temperature=1.0, seed=seed)), healing=HEALING)
        sampler = Sampler(len(TOKENS), torch.device("cpu"), default_processors(len(TOKENS), encode))
        output: list[int] = []
        for _ in range(3):
            rows = [make_row(request, output)]
            sampled = sampler.sample(torch.zeros(1, len(TOKENS)), sampler.prepare(rows))
            output += sampled.token_ids[0]
        texts.add(tuple(TOKENS[token] for token in output))
    assert all(b"".join(text).startswith(b"ab") for text in texts)
    assert {text[0] for text in texts} == {b"a", b"ab", b"abc"}
    assert {text[1] for text in texts if text[0] == b"a"} == {b"b", b"bc"}
    assert len({text[1] for text in texts if text[0] != b"a"}) == len(TOKENS)  # then all of them may come


def test_a_minimum_of_tokens_comes_after_what_was_taken_back() -> None:
    """As many as without healing, and as a maximum does."""
    end = TOKENS.index(b"c")
    request = make_request(SamplingParams(temperature=0.0, min_tokens=2), stop_token_ids=frozenset({end}))
    request = evolve(request, healing=HEALING)
    sampler = Sampler(len(TOKENS), torch.device("cpu"), default_processors(len(TOKENS), encode))
    output: list[int] = []
    while end not in output:
        logits = torch.zeros(1, len(TOKENS))
        logits[0, [2, 3, end]] = torch.tensor([1.0, 2.0, 3.0])
        output += sampler.sample(logits, sampler.prepare([make_row(request, output)])).token_ids[0]
    assert b"".join(TOKENS[token] for token in output) == b"ab" + b"bb" + b"c"


def test_drafts_are_taken_back() -> None:
    state = HealingState(HEALING, [0])
    first = state.change()
    state.advance([1, 3, 6])
    assert state.change() is None
    state.roll_back(2)
    other = state.fork()
    other.advance([5])
    assert other.change() is None
    second = state.change()
    assert first is not None
    assert second is not None
    assert (sorted(first.tolist()), sorted(second.tolist())) == ([1, 2, 4], [3, 5])
    state.roll_back(1)
    again = state.change()
    assert again is not None
    assert again.tolist() == first.tolist()
