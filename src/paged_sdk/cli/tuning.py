"""Finds the best settings of a model on this machine, for ``paged-sdk tune``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer
from attrs import evolve

from paged_sdk import (
    ConfigError,
    IsqType,
    MemoryPlan,
    ModelLoadError,
    OutOfMemoryError,
    PagedCacheType,
    describe_machine,
    plan_memory,
)
from paged_sdk.cli.groups import given_options
from paged_sdk.cli.loading import AnyBuilder, builder_of, check_arch
from paged_sdk.cli.measuring import Speedometer, perplexity_of_sample
from paged_sdk.cli.options import EngineOptions, ModelOptions, OutputOptions, PagedOptions
from paged_sdk.cli.terminal import Progress, Terminal
from paged_sdk.cli.tune_options import TuneOptions
from paged_sdk.cli.tuning_report import Suggestion, Trial, Tuning

__all__ = ["Tuner", "best_threads", "best_type", "numbers_of_threads"]

TYPES: Final = ("Q8_0", "Q6K", "Q4K")
SMALLER: Final = 0.95
"""A type is tried only if it reduces the weights to less than this fraction: otherwise it can hardly be faster."""

ALIKE: Final = 1.03
"""Ratio up to which durations count as equal: runs of a second vary by as much."""

SECONDS: Final = 1.0
"""Approximate duration of a run."""

USUAL_CONTEXT: Final = 4096
PROMPT: Final = 128
DEPTH: Final = 16


class Tuner:
    """Measures a model with several settings.

    :param location: the model; None: the embedded one
    :param given: the user's options of the model, which are not changed
    :param options: the intended use
    """

    def __init__(
        self,
        location: str | None,
        given: ModelOptions,
        output: OutputOptions,
        options: TuneOptions,
        terminal: Terminal,
    ) -> None:
        self._location = location
        self._given = given
        self._output = output
        self._options = options
        self._terminal = terminal
        self._machine = describe_machine()
        self._refused: dict[str, str] = {}

    async def run(self) -> Tuning:
        """Run all trials, and derive suggestions.

        :raises typer.BadParameter: options that contradict each other or the model
        :raises PagedError: the model cannot be loaded with any of the types
        """
        options = self._options
        wanted = [IsqType.parse(each, setting="--try").value for each in options.types] or list(TYPES)
        plans = dict(self._plans([self._given.isq, *([] if self._given.isq else wanted)]))
        if not plans:
            raise OutOfMemoryError(next(iter(self._refused.values())))
        plan = next(iter(plans.values()))
        context_len = options.context_len or min(USUAL_CONTEXT, plan.max_model_len)
        if context_len > plan.max_model_len:
            raise typer.BadParameter(
                f"expected at most {plan.max_model_len}, what the model takes", param_hint="--context-len"
            )
        threads = self._machine.num_processors if self._given.num_threads is None else self._given.num_threads
        others = [] if self._given.num_threads or plan.devices != ("cpu",) else numbers_of_threads(threads)[1:]
        with self._terminal.progress(len(plans) + len(others)) as progress:
            types = [
                await self._trial(evolve(self._given, isq=isq, num_threads=threads), each, progress)
                for isq, each in plans.items()
            ]
            chosen = best_type(types, max_loss=options.max_loss / 100)
            by_threads = [chosen]
            for number in others:
                model = evolve(self._given, isq=chosen.isq, num_threads=number)
                by_threads.append(await self._trial(model, plans[chosen.isq], progress, chosen.perplexity))
        final = best_threads(by_threads)
        model = evolve(self._given, isq=final.isq, num_threads=final.num_threads)
        suggestions = [
            *self._about_type(types, final),
            *self._about_threads(by_threads, final),
            *self._about_memory(model, context_len),
            Suggestion(name="max_seqs", value=options.streams, why="as many as the KV cache has room for; others wait"),
        ]
        location = {} if self._location is None else {"model_id": self._location}
        return Tuning(
            model=plan.model,
            architecture=plan.architecture,
            machine=self._machine,
            streams=options.streams,
            context_len=context_len,
            given=location | given_options(self._given),
            types=tuple(types),
            refused=self._refused,
            threads=tuple(by_threads),
            suggestions=tuple(suggestions),
        )

    def _plans(self, types: Sequence[str | None]) -> Iterator[tuple[str | None, MemoryPlan]]:
        """Return the memory plan for each type that is worth trying; store reasons against the others."""
        stored: int | None = None
        for isq in types:
            try:
                plan = plan_memory(self._builder(evolve(self._given, isq=isq)))
            except OutOfMemoryError as error:
                self._refused[isq or "as they are"] = str(error)
                continue
            except (ConfigError, ModelLoadError) as error:
                if isq in (None, self._given.isq):
                    raise
                self._refused[str(isq)] = str(error)
                continue
            if stored is not None and plan.weight_bytes > SMALLER * stored:
                self._refused[str(isq)] = (
                    f"{plan.weight_bytes / 2**20:.0f} MiB are hardly less than {stored / 2**20:.0f}"
                )
                continue
            stored = plan.weight_bytes if isq is None else stored
            yield isq, plan

    def _builder(self, model: ModelOptions, paged: PagedOptions | None = None) -> AnyBuilder:
        engine = EngineOptions(max_seqs=self._options.streams)
        return builder_of(self._location, model, paged or PagedOptions(), engine, self._output)

    async def _trial(
        self, options: ModelOptions, plan: MemoryPlan, progress: Progress, perplexity: float | None = None
    ) -> Trial:
        """Load the model with some settings, and measure it.

        :param perplexity: the perplexity, if known from another trial with the same weights
        """
        streams = self._options.streams
        name = f"{plan.model}, {options.isq or 'as it is'}, {options.num_threads} threads"
        progress.begin(name)
        # Room for the sample text, and for a prompt and a generated text per stream.
        paged = PagedOptions(pa_context_len=1024 + 512 * streams) if plan.paged else PagedOptions()
        with self._terminal.loading(name):
            model = await self._builder(options, paged).build()
        async with model:
            check_arch(model.model_type, options.arch)
            if perplexity is None:
                perplexity = await perplexity_of_sample(model)
            first = await Speedometer.of(model, warmup=0, iterations=1)
            rate = (await first.texts(8, streams=streams, depth=DEPTH)).median
            speedometer = await Speedometer.of(model, warmup=0, iterations=3)
            tokens = min(max(int(rate * SECONDS / streams), 8), 128)
            text = await speedometer.texts(tokens, streams=streams, depth=DEPTH)
            prompt = await speedometer.prompts(PROMPT)
        progress.advance()
        return Trial(
            isq=options.isq,
            num_threads=options.num_threads or self._machine.num_processors,
            weight_bytes=plan.weight_bytes,
            perplexity=perplexity,
            prompt=prompt,
            text=text,
        )

    def _about_type(self, types: Sequence[Trial], final: Trial) -> Iterator[Suggestion]:
        if final.isq is None or self._given.isq is not None:
            return
        chosen = next(each for each in types if each.isq == final.isq)
        if types[0].isq is not None:
            yield Suggestion(name="isq", value=final.isq, why="as they are, the weights do not fit")
            return
        faster = types[0].chat_seconds / chosen.chat_seconds
        worse = (chosen.perplexity / types[0].perplexity - 1) * 100
        yield Suggestion(
            name="isq",
            value=final.isq,
            why=f"{faster:.2f} times as fast as the weights are, and the perplexity is {worse:+.1f} %",
        )

    def _about_threads(self, trials: Sequence[Trial], final: Trial) -> Iterator[Suggestion]:
        if len(trials) == 1:
            return
        slower = min(trials, key=lambda each: each.chat_seconds).chat_seconds / final.chat_seconds
        why = "the fastest" if slower == 1 else "as fast as more, to within 3 %, and others get the rest"
        yield Suggestion(name="num_threads", value=final.num_threads, why=why)

    def _about_memory(self, model: ModelOptions, context_len: int) -> Iterator[Suggestion]:
        """Suggest size and type of the KV cache: the model's dtype if it fits, otherwise 8 bits."""
        streams = self._options.streams
        wanted = streams * context_len
        largest: dict[PagedCacheType, int] = {}
        for cache_type in PagedCacheType.AUTO, PagedCacheType.F8E4M3:
            try:
                plan = self._plan_of(model, wanted, cache_type)
            except OutOfMemoryError as error:
                if error.largest_context is None:
                    raise
                largest[cache_type] = error.largest_context
                continue
            except ConfigError:  # a platform without a paged cache, or without this type
                continue
            size = f"{plan.kv_bytes / 2**20:.0f} MiB"
            yield Suggestion(name="pa_context_len", value=wanted, why=f"{streams} times {context_len} tokens, {size}")
            if cache_type is PagedCacheType.F8E4M3:
                yield Suggestion(name="pa_cache_type", value=cache_type, why="half the size: otherwise it does not fit")
            return
        if largest:
            cache_type, tokens = max(largest.items(), key=lambda each: each[1])
            why = f"the largest that fits: {wanted} tokens were wanted"
            yield Suggestion(name="pa_context_len", value=tokens, why=why)
            yield Suggestion(name="pa_cache_type", value=cache_type, why="with which most tokens fit")

    def _plan_of(self, model: ModelOptions, tokens: int, cache_type: PagedCacheType) -> MemoryPlan:
        kind: dict[str, Any] = {} if cache_type is PagedCacheType.AUTO else {"pa_cache_type": cache_type}
        return plan_memory(self._builder(model, PagedOptions(pa_context_len=tokens, **kind)))


def best_type(trials: Sequence[Trial], *, max_loss: float) -> Trial:
    """Return the fastest trial whose perplexity is acceptable; among about equally fast ones, that with the lowest
    perplexity.

    :param trials: trials from the largest weights to the smallest
    :param max_loss: acceptable increase of perplexity, as a fraction of the first trial's
    """
    good = [each for each in trials if each.perplexity <= trials[0].perplexity * (1 + max_loss)]
    fastest = min(each.chat_seconds for each in good)
    return min((each for each in good if each.chat_seconds <= fastest * ALIKE), key=lambda each: each.perplexity)


def best_threads(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the fewest threads among those that are about as fast as the fastest."""
    fastest = min(each.chat_seconds for each in trials)
    return min((each for each in trials if each.chat_seconds <= fastest * ALIKE), key=lambda each: each.num_threads)


def numbers_of_threads(processors: int) -> list[int]:
    """Return the numbers of threads to try, largest first: all, three quarters and half of the processors."""
    return sorted({processors, max(processors * 3 // 4, 1), max(processors // 2, 1)}, reverse=True)
