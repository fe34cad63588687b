"""Learns from step times how many prompt tokens a step may compute while other sequences decode."""

from __future__ import annotations

import math
from typing import Final

from paged_sdk.scheduler.chunk_cost import ChunkCost
from paged_sdk.scheduler.step_times import StepTimes, size_of

__all__ = ["FIRST_CHUNK", "LEAST_CHUNK", "PROBE_INTERVAL", "Pace"]

FIRST_CHUNK: Final = 32
"""Size of the first prefill chunk, before any chunk's cost has been measured."""
LEAST_CHUNK: Final = 16
"""Smallest chunk, apart from a prompt's end: matrix products and attention process rows in tiles of about this size. On
SmolLM2 after 1,900 tokens, 8 tokens take 32 ms of one thread and 16 take 39."""
MOST_OVER: Final = 2.0
"""A chunk may take at most this multiple of its planned time, which does not include its fixed cost. The more of a
chunk's time is attributed to the fixed cost, the larger the chunk gets; this bounds the effect of a wrong estimate."""
PROBE_INTERVAL: Final = 64
"""After this many steps with prompts, one runs without: otherwise a change in the machine's speed would go unnoticed
while prompts arrive without pause. A step without prompts takes a third of a mixed one, so prefill loses half a
percent."""
_BITS: Final = 3
"""Numbers of decoding sequences with this many equal leading bits share their probe steps."""


class Pace:
    """Divides step time between prefill and decoding sequences.

    A prefill chunk delays every decoding sequence: 512 tokens of SmolLM2 take 40 times as long as one token of each of
    8 sequences. The factor depends on the model, on the machine and its load, and on the chunk's depth in its prompt,
    so it is measured: the engine reports how long each step took. The time of a step that only decodes is kept by
    number of sequences; the time that chunks add is estimated by :class:`ChunkCost`.

    Let D be the time of a step that only decodes. Beside decoding sequences, a step gets as many prompt tokens as take
    ``(max_slowdown - 1) * D``. A decoded token then takes ``max_slowdown`` times as long as without the prompt, and the
    prompt ``max_slowdown / (max_slowdown - 1)`` times as long as without decoding sequences: 3 and 1.5. A chunk's fixed
    cost is not counted, so it lengthens both by one factor; if it were counted, prefill would stop where the fixed cost
    is as long as the share. Stall-free batching (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
    with Sarathi-Serve", 2024) bounds chunks likewise, by a time between tokens in seconds.

    If more prompts wait than sequences decode, prefill gets proportionally more time: otherwise the first of many
    requests that arrive together would delay all others.

    :param max_slowdown: by what factor decoding may slow down beside prefill; above 1
    :param times: how long steps without prompts take
    """

    def __init__(self, max_slowdown: float, times: StepTimes) -> None:
        self._share = max_slowdown - 1
        self._times = times
        self._next_probe: dict[int, int] = {}  # by size of the batch: value of _num_mixed at which to run a plain step
        self._chunks = ChunkCost()
        self._num_mixed = 0

    def prompt_seconds(self, num_decodes: int, num_prompts: int) -> float:
        """Return how long the next step may spend on prefill; ``inf`` if nothing was measured yet.

        :param num_decodes: how many sequences decode in the step, at least one
        :param num_prompts: how many prompts are not fully computed
        :returns: 0 for a step that measures the decoding sequences alone
        """
        if self._num_mixed >= self._next_probe.get(size_of(num_decodes, _BITS), 0):
            self._next_probe[size_of(num_decodes, _BITS)] = self._num_mixed + PROBE_INTERVAL
            self._times.forget(num_decodes)
            return 0.0
        seconds = self._times.nearest(num_decodes)
        if not seconds:  # unknown, or 0 by a coarse clock
            return math.inf
        return self._share * max(1.0, num_prompts / num_decodes) * seconds

    def tokens(self, seconds: float, depth: int) -> int:
        """Return how many prompt tokens to compute in the given time.

        :param seconds: result of :meth:`prompt_seconds`, not 0
        :param depth: how many tokens of the prompt are computed already
        """
        if math.isinf(seconds) or not self._chunks.is_known:
            return FIRST_CHUNK
        most = MOST_OVER * seconds / self._chunks.mean
        return max(LEAST_CHUNK, int(min(seconds / self._chunks.per_token(depth), most)))

    def note_plain(self, seconds: float, num_decodes: int) -> None:
        """Record how long a step without prompts and drafts took.

        :param num_decodes: how many sequences decoded
        """
        self._times.note(num_decodes, seconds)
        self._next_probe[size_of(num_decodes, _BITS)] = self._num_mixed + PROBE_INTERVAL

    def note_mixed(self, seconds: float, num_decodes: int, num_tokens: int, depth: float) -> None:
        """Record how long a step with prompts took.

        :param num_decodes: how many tokens of decoding sequences it computed, drafts included; may be 0
        :param num_tokens: how many prompt tokens it computed
        :param depth: how many tokens preceded each of these in its prompt, on average
        """
        self._num_mixed += 1
        if num_tokens < LEAST_CHUNK:  # its time says little about larger chunks
            return
        plain = self._times.nearest(num_decodes) if num_decodes else 0.0
        if plain is not None:
            self._chunks.note(num_tokens, depth, seconds - plain)
