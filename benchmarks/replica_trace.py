"""Generate random chats of many tenants, and model the duration of steps, for simulated replicas."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Final

from attrs import define, field, frozen

__all__ = ["QWEN", "Chat", "ChatRules", "Costs", "chats"]

VOCABULARY: Final = range(150_000)


@frozen
class Costs:
    """Models the duration of a step, in milliseconds.

    :ivar texts_ms: pairs of a number of decoding sequences and the duration of a step with these
    :ivar token_ms: duration per prompt token, without attention
    :ivar pair_ms: attention of one prompt token to one earlier token
    :ivar key_ms: attention of one decoded token to one earlier token
    """

    texts_ms: tuple[tuple[int, float], ...]
    token_ms: float
    pair_ms: float
    key_ms: float

    def texts_seconds(self, num_texts: float) -> float:
        """Return the duration of a decode step, interpolated linearly between measured numbers of sequences."""
        points = self.texts_ms
        place = min(max(bisect_left(points, (num_texts, 0.0)), 1), len(points) - 1)
        (few, fast), (many, slow) = points[place - 1], points[place]
        return (fast + (num_texts - few) * (slow - fast) / (many - few)) / 1e3

    def step_seconds(self, num_texts: int, num_keys: int, num_tokens: int, num_pairs: float) -> float:
        """Return the duration of a step.

        :param num_keys: total context length of the decoding sequences
        :param num_tokens: prompt tokens in the step
        :param num_pairs: pairs of one of these with an earlier token of its prompt
        """
        texts = self.texts_seconds(num_texts) if num_texts else 0.0
        return texts + (num_keys * self.key_ms + num_tokens * self.token_ms + num_pairs * self.pair_ms) / 1e3


QWEN: Final = Costs(((0, 25.0), (1, 29.7), (4, 41.2), (16, 103.9)), token_ms=3.285, pair_ms=3.985e-4, key_ms=1.6e-3)
"""Qwen2.5-Coder-1.5B, Q4_K_M, on two virtual cores of Zen 4, from docs/benchmarks/zen4.md: 33.7, 97 and 154 tokens a
second with 1, 4 and 16 streams; prompts of 1,000 and 4,000 tokens at 287 and 245 tokens a second; 27.6 tokens a second
after 4,000 tokens."""


@frozen(kw_only=True)
class ChatRules:
    """Holds the distribution of chats.

    :ivar tenants: number of tenants; the k-th has 1/k of the first one's chats
    :ivar chats_per_second: rate at which chats begin (a Poisson process)
    :ivar system_tokens: shortest and longest system prompt of a tenant
    :ivar turns: mean number of turns per chat; each turn is the last with the same probability
    :ivar turn_tokens: median length of a user's message; a tenth is 3.6 times as long
    :ivar answer_tokens: median length of an answer; a tenth is 3.6 times as long
    :ivar pause: mean seconds between an answer and the next turn
    """

    tenants: int
    chats_per_second: float
    system_tokens: tuple[int, int] = (200, 1200)
    turns: float = 4.0
    turn_tokens: float = 40.0
    answer_tokens: float = 60.0
    pause: float = 20.0


@define(eq=False)
class Chat:
    """Holds one conversation.

    :ivar tokens: all tokens so far, including the system prompt
    :ivar turns_left: number of further turns
    """

    rules: ChatRules
    random: Random
    tokens: array[int]
    turns_left: int
    begins_at: float
    num_lost: int = field(default=0)

    def say(self) -> int:
        """Add a user's message; return the length of its answer."""
        self.turns_left -= 1
        self.tokens.extend(_tokens(self.random, _length(self.random, self.rules.turn_tokens, 400)))
        return _length(self.random, self.rules.answer_tokens, 600)

    def pause(self) -> float:
        """Return the seconds until the user's next message."""
        return self.random.expovariate(1 / self.rules.pause)


def chats(rules: ChatRules, seconds: float, *, seed: int) -> Iterator[Chat]:
    """Return the chats that begin within a number of seconds, in order."""
    rng = Random(seed)
    systems: list[list[int] | None] = [None] * rules.tenants
    weights = list(accumulate(1 / place for place in range(1, rules.tenants + 1)))
    now = 0.0
    while (now := now + rng.expovariate(rules.chats_per_second)) < seconds:
        tenant = bisect_left(weights, rng.random() * weights[-1])
        system = systems[tenant]
        if system is None:
            own = Random(seed * 1_000_003 + tenant)
            system = systems[tenant] = _tokens(own, own.randint(*rules.system_tokens))
        turns = 1
        while turns < 30 and rng.random() > 1 / rules.turns:
            turns += 1
        yield Chat(rules, Random(rng.getrandbits(32)), array("I", system), turns, now)


def _tokens(rng: Random, count: int) -> list[int]:
    return rng.choices(VOCABULARY, k=count)


def _length(rng: Random, median: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0.0, 1.0))))
