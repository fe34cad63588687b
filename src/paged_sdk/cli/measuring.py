"""Measures a loaded model's prefill and decode speed, and its perplexity on a sample text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import Any

from attrs import frozen

from paged_sdk import Model, SamplingParams, Usage

__all__ = ["Measurement", "Speedometer", "perplexity_of_sample"]

SAMPLE = """\
The harbour lies on the north side of the island, where the cliffs keep most of the wind away. Boats come in with the
tide in the morning, and by noon the fish has been weighed, packed in ice and sent to the mainland. Forty years ago
there were ninety families who lived from it; today there are eleven, and most of their children study or work
somewhere else. When the old lighthouse was switched off, the council asked what should become of it. Some wanted a
museum, others a small hotel, and one teacher proposed a station that measures the temperature of the sea, because no
one had done so there since 1962. The teacher won by three votes. Since then the pupils have read the instruments every
day, written the numbers into a table and compared them with those of the year before. In the first winter the water
was 1.4 degrees warmer than in the old records, and nobody was sure whether the instruments or the sea had changed. So
they built a second set, lowered it beside the first, and waited for a month. Both sets agreed.
"""


@frozen(kw_only=True)
class Measurement:
    """Holds the speeds of several runs.

    :ivar kind: "prompt": prefill; "text": decode
    :ivar streams: number of concurrent prompts or texts
    :ivar tokens: tokens of each prompt or text
    :ivar rates: total tokens per second of each run
    :ivar of_replicas: each replica's share of the median rate; empty if there is one replica
    """

    kind: str
    streams: int
    tokens: int
    rates: tuple[float, ...]
    of_replicas: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Return the median rate."""
        return median(self.rates)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain data."""
        return {
            "kind": self.kind,
            "streams": self.streams,
            "tokens": self.tokens,
            "median_tok_per_sec": self.median,
            "tok_per_sec": list(self.rates),
            "tok_per_sec_of_replicas": list(self.of_replicas),
        }


class Speedometer:
    """Measures the speed of a model with random prompts, which the prefix cache does not hold.

    :param token_ids: tokens that prompts are drawn from
    :param warmup: unmeasured runs before the measured ones
    :param iterations: measured runs
    :param after_run: called after each run
    """

    def __init__(
        self,
        model: Model,
        token_ids: Sequence[int],
        *,
        warmup: int,
        iterations: int,
        after_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._token_ids = token_ids
        self._warmup = warmup
        self._iterations = iterations
        self._after_run = after_run
        self._random = Random(0)

    @classmethod
    async def of(cls, model: Model, **settings: Any) -> Speedometer:
        """Create a speedometer whose prompts are drawn from the tokens of ``SAMPLE``."""
        return cls(model, await model.tokenize(SAMPLE), **settings)

    async def prompts(self, tokens: int) -> Measurement:
        """Measure prefill speed: a prompt's tokens divided by the time to the first token of its answer. With several
        replicas, one prompt per replica runs at a time.

        :raises RequestError: the prompt does not fit
        """
        rates, shares = list[float](), _Shares(self._model, "prompt_tokens")
        streams = len(self._model.replicas)
        for number in range(self._warmup + self._iterations):
            shares.begin()
            prompts = [self._prompt(tokens) for _ in range(streams)]
            usages = await asyncio.gather(*(self._usage(each, 1) for each in prompts))
            seconds = max(usage.time_to_first_token_sec for usage in usages)
            if number >= self._warmup:
                rates.append(streams * tokens / seconds)
                shares.end()
            self._after_run()
        return self._measurement("prompt", streams, tokens, rates, shares)

    async def texts(self, tokens: int, *, streams: int, depth: int) -> Measurement:
        """Measure decode speed: the texts' tokens divided by the time from the first token of any text to the last.

        :param tokens: tokens of each text, at least 2
        :param streams: number of concurrent texts
        :param depth: prompt tokens before each text, which have been put into the prefix cache, if there is one
        :raises RequestError: prompt and text do not fit
        """
        rates, shares = list[float](), _Shares(self._model, "completion_tokens")
        for number in range(self._warmup + self._iterations):
            prompts = [self._prompt(depth) for _ in range(streams)]
            await asyncio.gather(*(self._usage(each, 1) for each in prompts))
            shares.begin()
            times = await asyncio.gather(*(self._text(each, tokens) for each in prompts))
            seconds = max(end for _, end in times) - min(start for start, _ in times)
            if number >= self._warmup:
                rates.append(streams * (tokens - 1) / seconds)
                shares.end()
            self._after_run()
        return self._measurement("text", streams, tokens, rates, shares)

    def _measurement(
        self, kind: str, streams: int, tokens: int, rates: Sequence[float], shares: _Shares
    ) -> Measurement:
        parts = tuple(share * median(rates) for share in shares.of_replicas)
        return Measurement(kind=kind, streams=streams, tokens=tokens, rates=tuple(rates), of_replicas=parts)

    async def _text(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Generate a text; return the times of its first and last token."""
        sent = time.perf_counter()
        usage = await self._usage(prompt, tokens)
        first = sent + usage.time_to_first_token_sec
        return first, first + usage.total_completion_time_sec

    async def _usage(self, prompt: list[int], tokens: int) -> Usage:
        return (await self._model.send_completion_request(prompt, _sampling(tokens))).usage

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._token_ids, k=tokens)


class _Shares:
    """Counts each replica's share of the tokens in the measured runs.

    :param figure: name of the field of :class:`~paged_sdk.ModelStats` that counts the tokens
    """

    def __init__(self, model: Model, figure: str) -> None:
        self._replicas = model.replicas
        self._figure = figure
        self._before: list[int] = []
        self._counts = [0] * len(self._replicas)

    def begin(self) -> None:
        """Store the counts at the start of a run."""
        self._before = self._figures()

    def end(self) -> None:
        """Add the tokens since :meth:`begin`."""
        gained = zip(self._counts, self._before, self._figures(), strict=True)
        self._counts = [count + after - before for count, before, after in gained]

    @property
    def of_replicas(self) -> tuple[float, ...]:
        """Return each replica's fraction of all tokens; empty if there is one replica."""
        total = sum(self._counts)
        return tuple(count / max(total, 1) for count in self._counts) if len(self._counts) > 1 else ()

    def _figures(self) -> list[int]:
        return [getattr(each.stats(), self._figure) for each in self._replicas]


async def perplexity_of_sample(model: Model) -> float:
    """Return a model's perplexity on a short English text, which shows the loss by quantization."""
    (score,) = (await model.score(SAMPLE)).scores
    return score.perplexity


def _sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_len=tokens, ignore_eos=True)
