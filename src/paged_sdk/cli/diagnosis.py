"""Reports what a machine has and what a model uses of it, as text or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from attrs import asdict, frozen

from paged_sdk import BlockingModel, MachineReport, MemoryPlan, Model, describe_machine, plan_memory
from paged_sdk.cli.loading import AnyBuilder
from paged_sdk.cli.terminal import Terminal

__all__ = ["Diagnosis", "LoadedReport", "log_lines", "machine_lines"]


@frozen(kw_only=True)
class LoadedReport:
    """Describes a loaded model.

    :ivar name: the model's name
    :ivar model_type: family of the model
    :ivar architecture: family of its decoder
    :ivar num_blocks: blocks of its KV pool, or slots of a contiguous cache
    :ivar decisions: log lines of loading: each choice, and why no faster one was possible
    """

    name: str
    model_type: str
    architecture: str
    num_blocks: int
    decisions: tuple[str, ...]

    @classmethod
    def of(cls, model: Model | BlockingModel, decisions: Iterable[str]) -> Self:
        """Describe a model.

        :param decisions: log lines of loading
        """
        return cls(
            name=model.name,
            model_type=model.model_type,
            architecture=model.architecture,
            num_blocks=model.stats().blocks_total,
            decisions=tuple(decisions),
        )


@frozen(kw_only=True)
class Diagnosis:
    """Holds a report on the machine, and on a model if one was given.

    :ivar plan: memory plan of a model that was not loaded
    :ivar loaded: description of a model that was loaded
    """

    machine: MachineReport
    plan: MemoryPlan | None = None
    loaded: LoadedReport | None = None

    @classmethod
    def of(cls, builder: AnyBuilder | None, terminal: Terminal, *, loads: bool) -> Self:
        """Examine the machine, and a model if there is one.

        :param loads: whether to load the model; False: read only the headers of its files
        :raises PagedError: the model cannot be loaded or does not fit
        """
        machine = describe_machine()
        if builder is None:
            return cls(machine=machine)
        if not loads:
            return cls(machine=machine, plan=plan_memory(builder))
        with log_lines() as lines, terminal.loading(builder.source.location):
            model = BlockingModel(builder.build())
        with model:
            return cls(machine=machine, loaded=LoadedReport.of(model, lines))

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        found: dict[str, Any] = {"machine": self.machine.to_dict()}
        if self.plan is not None:
            found["plan"] = self.plan.to_dict()
        if self.loaded is not None:
            found["model"] = asdict(self.loaded)
        return json.dumps(found, indent=2)

    def to_text(self) -> str:
        """Return everything as readable text."""
        lines = [*machine_lines(self.machine)]
        if self.plan is not None:
            lines += ["", *plan_lines(self.plan)]
        if self.loaded is not None:
            lines += ["", f"{self.loaded.name} ({self.loaded.architecture})", *self.loaded.decisions]
        return "\n".join(lines)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the package's log lines within this context."""
    lines: list[str] = []

    class Collector(logging.Handler):
        """Adds each record to the lines."""

        def emit(self, record: logging.LogRecord) -> None:
            """Take one record."""
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("paged_sdk"), Collector(logging.INFO)
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(collector)


def machine_lines(machine: MachineReport) -> Iterator[str]:
    """Return lines that describe a machine."""
    yield f"paged-sdk {machine.package}, Python {machine.python}, {machine.system}"
    count = f"{machine.num_processors} processor{'s' if machine.num_processors > 1 else ''} usable"
    yield f"Processor: {machine.processor or 'unknown'}, {count}"
    yield f"Features: {' '.join(machine.features) or 'unknown'}"
    if machine.kernel_level is None:
        yield f"CPU kernels: {machine.kernels}"
    else:
        others = ", ".join(machine.kernel_levels[1:])
        yield f"CPU kernels: {machine.kernel_level}, the fastest that runs here{f' (also {others})' if others else ''}"
    yield f"dtype on the CPU: {machine.dtype}"
    yield f"Memory: {machine.memory_mib} MiB, of which {machine.free_mib} MiB are free"
    if machine.address_mib is not None:
        yield f"Addresses: at most {machine.address_mib} MiB (ulimit -v)"
    for index, gpu in enumerate(machine.gpus):
        kernels = "Triton's kernels" if gpu.why_no_triton is None else f"torch's kernels, because {gpu.why_no_triton}"
        memory = f"{gpu.memory_mib} MiB, of which {gpu.free_mib} MiB are free"
        yield f"cuda:{index}: {gpu.name}, compute capability {gpu.capability}, {memory}; {kernels}"
    if not machine.gpus:
        yield "CUDA devices: none"
    yield ", ".join(f"{name} {found or 'not installed'}" for name, found in machine.versions.items())


def plan_lines(plan: MemoryPlan) -> Iterator[str]:
    """Return lines that describe a memory plan."""
    yield f"{plan.model} ({plan.architecture}) on {', '.join(plan.devices)} in {plan.dtype}"
    quantized = "" if plan.isq is None else f", quantized to {plan.isq}"
    yield f"Weights: about {plan.weight_bytes / 2**20:.1f} MiB{quantized}"
    if plan.state_bytes:
        yield f"States of recurrent layers: {plan.state_bytes / 2**20:.1f} MiB"
    each = f"{plan.bytes_per_token / 1024:.2f} KiB a token"
    if plan.paged:
        pool = f"{plan.num_blocks} blocks of {plan.block_size} tokens, {plan.kv_tokens} tokens"
        yield f"KV cache: {pool}, {plan.kv_bytes / 2**20:.1f} MiB ({plan.cache_type}, {each})"
    else:
        yield (
            f"KV cache: not paged; at most {plan.kv_bytes / 2**20:.1f} MiB for a sequence of {plan.kv_tokens} tokens "
            f"({each})"
        )
    yield f"Context: at most {plan.max_model_len} tokens; at most {plan.max_num_seqs} sequences at once"
