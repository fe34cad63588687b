"""Measures a model for ``paged-sdk bench``, and formats the results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import typer
from attrs import asdict, frozen

from paged_sdk import MachineReport
from paged_sdk.cli.bench_options import BenchOptions
from paged_sdk.cli.diagnosis import LoadedReport, log_lines
from paged_sdk.cli.loading import AnyBuilder, check_arch, load
from paged_sdk.cli.measuring import Measurement, Speedometer
from paged_sdk.cli.tables import table
from paged_sdk.cli.terminal import Terminal

__all__ = ["Benchmark"]


@frozen(kw_only=True)
class Benchmark:
    """Holds the results of a benchmark, with the model and the machine.

    :ivar num_threads: CPU threads per step, in each replica
    :ivar load_seconds: time to load the model
    :ivar preemptions: sequences that were preempted and recomputed, because the KV pool was too small for all
    """

    machine: MachineReport
    model: LoadedReport
    num_threads: int
    load_seconds: float
    preemptions: int
    options: BenchOptions
    results: tuple[Measurement, ...]

    @classmethod
    async def of(
        cls,
        builder: AnyBuilder,
        machine: MachineReport,
        options: BenchOptions,
        terminal: Terminal,
        *,
        arch: str | None,
    ) -> Self:
        """Load a model and measure it.

        :param builder: the model's builder, with its number of threads set
        :param arch: the model family to check for, if given
        :raises typer.BadParameter: the model is of another family, or prompts and texts do not fit
        :raises PagedError: the model cannot be loaded, or the KV pool has no room for a prompt
        """
        start = time.perf_counter()
        with log_lines() as lines, terminal.loading(builder.source.location):
            model = await load(builder, replicas=options.replicas)
        load_seconds = time.perf_counter() - start
        async with model:
            check_arch(model.model_type, arch)
            _check_lengths(options, model.max_sequence_length)
            loaded = LoadedReport.of(model, _of_first(lines))
            runs = (len(options.streams) + bool(options.prompt_len)) * (options.warmup + options.iterations)
            with terminal.progress(runs) as progress:
                speedometer = await Speedometer.of(
                    model, warmup=options.warmup, iterations=options.iterations, after_run=progress.advance
                )
                results = []
                if options.prompt_len:
                    progress.begin(f"a prompt of {options.prompt_len} tokens")
                    results.append(await speedometer.prompts(options.prompt_len))
                for streams in options.streams:
                    progress.begin(_name("text", streams, options.gen_len))
                    results.append(await speedometer.texts(options.gen_len, streams=streams, depth=options.depth))
            preemptions = model.stats().preemptions
        return cls(
            machine=machine,
            model=loaded,
            num_threads=builder.settings.num_threads or max(machine.num_processors // options.replicas, 1),
            load_seconds=load_seconds,
            preemptions=preemptions,
            options=options,
            results=tuple(results),
        )

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        return json.dumps(
            {
                "machine": self.machine.to_dict(),
                "model": asdict(self.model),
                "num_threads": self.num_threads,
                "load_seconds": self.load_seconds,
                "preemptions": self.preemptions,
                "options": asdict(self.options),
                "results": [each.to_dict() for each in self.results],
            },
            indent=2,
        )

    def to_text(self) -> str:
        """Return everything as readable text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        machine = self.machine
        yield f"{self.model.name} ({self.model.architecture}), loaded in {self.load_seconds:.1f} s"
        yield from self.model.decisions
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        if self.options.replicas > 1:
            threads = f"{self.options.replicas} replicas, each of {threads}"
        yield f"{machine.processor_name}, {threads}, CPU kernels: {machine.kernels}"
        for gpu in machine.gpus:
            yield f"{gpu.name}, compute capability {gpu.capability}"
        options = self.options
        runs = f"{options.iterations} run{'s' if options.iterations > 1 else ''}"
        yield f"{runs} after {options.warmup} for warm-up; tokens per second"
        yield ""
        rows: list[Sequence[str]] = [("", "median", "lowest", "highest", "each")]
        for each in self.results:
            rates = (each.median, min(each.rates), max(each.rates), each.median / each.streams)
            rows.append((_name(each.kind, each.streams, each.tokens), *(f"{rate:.1f}" for rate in rates)))
        yield from table(rows)
        if self.options.replicas > 1:
            yield ""
            yield from table(list(self._rows_of_replicas()))
        if self.preemptions:
            yield ""
            yield f"{self.preemptions} texts were computed again: the KV pool is too small for so many at once."

    def _rows_of_replicas(self) -> Iterator[Sequence[str]]:
        """Return each replica's share of the median rates."""
        yield ("of these", *(f"replica {place}" for place in range(self.options.replicas)))
        for each in self.results:
            name = _name(each.kind, each.streams, each.tokens)
            yield (name, *(f"{rate:.1f}" for rate in each.of_replicas))


def _check_lengths(options: BenchOptions, limit: int) -> None:
    """Check that what is measured fits the context: a text that ended at its end would have a rate of other tokens.

    :param limit: tokens of the longest sequence
    :raises typer.BadParameter: it does not fit; of the option that is too large
    """
    fits = f"the context of {limit} tokens"
    if options.prompt_len and options.prompt_len >= limit:
        reason = f"{options.prompt_len} tokens and one of an answer do not fit {fits}"
        raise typer.BadParameter(reason, param_hint="--prompt-len")
    if options.depth + options.gen_len > limit:
        reason = f"a prompt of {options.depth} tokens and a text of {options.gen_len} do not fit {fits}"
        hint = "--gen-len" if options.gen_len > options.depth else "--depth"
        raise typer.BadParameter(reason, param_hint=hint)


def _of_first(lines: Iterable[str]) -> Iterator[str]:
    """Return the log lines of this process and of replica 0; the other replicas' lines repeat those."""
    for line in lines:
        logger, separator, text = line.partition(": ")
        if not (separator and logger.startswith("replica ")):
            yield line
        elif logger == "replica 0":
            yield text


def _name(kind: str, streams: int, tokens: int) -> str:
    return f"{kind} of {tokens} tokens" if streams == 1 else f"{streams} {kind}s of {tokens} tokens"
