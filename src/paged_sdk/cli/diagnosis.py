"""Find out what a machine has and what a model uses of it, and write it down for people and for programs."""

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

__all__ = ["Diagnosis", "LoadedReport", "log_lines", "plan_lines"]


@frozen(kw_only=True)
class LoadedReport:
    """Says what a model used that was loaded.

    :ivar name: the model's
    :ivar model_type: the family it is of, and
    :ivar architecture: its decoder's
    :ivar num_blocks: in its KV pool, or slots of a cache that is not paged
    :ivar decisions: what the log said while it was loaded: each choice, and why no faster one was possible
    """

    name: str
    model_type: str
    architecture: str
    num_blocks: int
    decisions: tuple[str, ...]

    @classmethod
    def of(cls, model: Model | BlockingModel, decisions: Iterable[str]) -> Self:
        """Describe a model.

        :param decisions: what the log said
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
    """Holds what was found out.

    :ivar plan: of a model that was not loaded
    :ivar loaded: of one that was
    """

    machine: MachineReport
    plan: MemoryPlan | None = None
    loaded: LoadedReport | None = None

    @classmethod
    def of(cls, builder: AnyBuilder | None, terminal: Terminal, *, loads: bool) -> Self:
        """Examine the machine, and a model if there is one.

        :param loads: whether to load it; False: to read the heads of its files only
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
        """Return everything as lines for people."""
        lines = [*machine_lines(self.machine)]
        if self.plan is not None:
            lines += ["", *plan_lines(self.plan)]
        if self.loaded is not None:
            lines += ["", f"{self.loaded.name} ({self.loaded.architecture})", *self.loaded.decisions]
        return "\n".join(lines)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect what the package's log says meanwhile."""
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
    """Write a machine down, one thing a line."""
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
    """Write a plan down, one thing a line."""
    yield f"{plan.model} ({plan.architecture}) on {', '.join(plan.devices)} in {plan.dtype}"
    quantized = "" if plan.isq is None else f", quantized to {plan.isq}"
    yield f"Weights: about {plan.weight_bytes / 2**20:.1f} MiB{quantized}"
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
