"""Learns from the times of steps how many prompt tokens a step may compute while texts wait for their next token."""

from __future__ import annotations

import math
from typing import Final

from paged_sdk.scheduler.chunk_cost import ChunkCost
from paged_sdk.scheduler.step_times import StepTimes, size_of

__all__ = ["FIRST_CHUNK", "LEAST_CHUNK", "PROBE_INTERVAL", "Pace"]

FIRST_CHUNK: Final = 32
"""A step takes so many tokens of a prompt before anything is known of what they cost."""
LEAST_CHUNK: Final = 16
"""A prompt goes on by at least so many tokens: products and attention take rows in tiles of about as many. On SmolLM2
after 1,900 tokens, 8 tokens take 32 ms of one thread and 16 take 39."""
MOST_OVER: Final = 2.0
"""What a chunk costs for itself may make it so much longer than planned: the more of a chunk's time is said to be of
that kind, the larger it gets, so a wrong estimate must have an end."""
PROBE_INTERVAL: Final = 64
"""Of so many steps with prompts, one goes without: otherwise nobody would notice that the machine has become faster or
slower while prompts come one after the other. A plain step takes a third of a mixed one: they lose half a percent."""
_BITS: Final = 3
"""Numbers of texts that have so many leading bits in common are looked at together."""


class Pace:
    """Divides the time of steps between prompts and the texts beside them.

    A chunk of a prompt holds up every text that is being generated: 512 tokens of SmolLM2 for 40 times as long as one
    token of 8 texts takes. How long depends on the model, on the machine and what else runs there, and on how deep in
    its prompt the chunk is. So it is measured: whoever runs the steps says how long each took. A step that only
    generates has its time by the number of texts; what chunks add to that follows a :class:`ChunkCost`.

    Let D be the time of a step that only generates. Beside such texts, a step gets as many tokens of prompts as take
    ``(max_slowdown - 1) * D``. Then a token takes ``max_slowdown`` times as long as without the prompt, and the prompt
    ``max_slowdown / (max_slowdown - 1)`` times as long as without the texts: 3 and 1.5. What a chunk costs for itself,
    however short it is, is not counted in, so that it makes both longer by one factor; counted in, it would leave
    prompts nothing where it is as long as the share. Stall-free batching (Agrawal et al., "Taming Throughput-Latency
    Tradeoff in LLM Inference with Sarathi-Serve", 2024) bounds chunks likewise, by a time between tokens in seconds.

    Where more prompts wait than texts are generated, prompts get more time in proportion: otherwise the first of many
    requests that arrive together would hold up all others.

    :param max_slowdown: by what factor a text's tokens may take longer beside a prompt; above 1
    :param times: how long steps without prompts take
    """

    def __init__(self, max_slowdown: float, times: StepTimes) -> None:
        self._share = max_slowdown - 1
        self._times = times
        self._next_probe: dict[int, int] = {}  # how many mixed steps there have to be for the next to be a plain one
        self._chunks = ChunkCost()
        self._num_mixed = 0

    def prompt_seconds(self, num_decodes: int, num_prompts: int) -> float:
        """Work out how long the next step may compute prompts; ``inf`` if nothing is known yet.

        :param num_decodes: how many texts get a token in the step, at least one
        :param num_prompts: how many prompts wait to be computed
        :returns: 0 for a step that shows how long the texts take by themselves
        """
        if self._num_mixed >= self._next_probe.get(size_of(num_decodes, _BITS), 0):
            self._next_probe[size_of(num_decodes, _BITS)] = self._num_mixed + PROBE_INTERVAL
            self._times.forget(num_decodes)
            return 0.0
        seconds = self._times.nearest(num_decodes)
        if not seconds:  # a clock may be too coarse to see a step
            return math.inf
        return self._share * max(1.0, num_prompts / num_decodes) * seconds

    def tokens(self, seconds: float, depth: int) -> int:
        """Return how many tokens of a prompt can be computed in some time.

        :param seconds: what :meth:`prompt_seconds` has returned, not 0
        :param depth: how many tokens of the prompt are computed already
        """
        if math.isinf(seconds) or not self._chunks.is_known:
            return FIRST_CHUNK
        most = MOST_OVER * seconds / self._chunks.mean
        return max(LEAST_CHUNK, int(min(seconds / self._chunks.per_token(depth), most)))

    def note_plain(self, seconds: float, num_decodes: int) -> None:
        """Take in how long a step without prompts and drafts took.

        :param num_decodes: how many texts it gave a token
        """
        self._times.note(num_decodes, seconds)
        self._next_probe[size_of(num_decodes, _BITS)] = self._num_mixed + PROBE_INTERVAL

    def note_mixed(self, seconds: float, num_decodes: int, num_tokens: int, depth: float) -> None:
        """Take in how long a step with prompts took.

        :param num_decodes: how many tokens it computed of texts, drafts among them; there may be none
        :param num_tokens: how many tokens of prompts it computed
        :param depth: how many tokens preceded each of them in its prompt, on average
        """
        self._num_mixed += 1
        if num_tokens < LEAST_CHUNK:  # whose time says little of larger ones
            return
        plain = self._times.nearest(num_decodes) if num_decodes else 0.0
        if plain is not None:
            self._chunks.note(num_tokens, depth, seconds - plain)
