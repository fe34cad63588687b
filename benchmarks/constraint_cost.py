"""Measure what constraints add to a decode step.

python -m benchmarks.constraint_cost --model smollm2 --streams 16

Rounds of constrained and plain texts of the same prompts and lengths alternate in one engine.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.step_rounds import ModelName, Rounds, StepRounds, Streams, Threads, Tokens
from paged_sdk import Constraint, Model, SamplingParams
from paged_sdk.sampling.constraint import Constraints
from paged_sdk.sampling.proposals import Proposals
from paged_sdk.speculative.forced_tokens import ForcedTokens

__all__ = ["CONSTRAINTS", "Round", "run_round"]


def _endless(item: Mapping[str, Any]) -> Constraint:
    return Constraint.json_schema({"type": "array", "items": item, "minItems": 10_000})


CONSTRAINTS: Final[Mapping[str, Constraint]] = MappingProxyType(
    {
        "strings": _endless({"type": "string", "minLength": 40, "maxLength": 80}),
        "records": _endless(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 30},
                    "population": {"type": "integer", "minimum": 0},
                    "kind": {"enum": ["city", "town", "village"]},
                },
                "required": ["name", "population", "kind"],
                "additionalProperties": False,
            }
        ),
        "expression": Constraint.regex("([A-Z][a-z]{2,12}( [a-z]{1,12}){3,9}[.?!] ){1000}"),
    }
)
"""Constraints whose texts do not end before their maximum length."""

_PARTS: Final = (
    (Constraints, "prepare", "masks"),
    (Constraints, "apply", "masks made late, and applied"),
    (Proposals, "__init__", "tokens proposed"),
    (ForcedTokens, "propose", "forced tokens looked for"),
)


@frozen
class Round:
    """Holds the times of a round.

    :ivar parts: seconds of each part of the work on constraints
    """

    seconds: float
    steps: int
    parts: Mapping[str, float]


async def run_round(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    constraint: Constraint | None,
    sampling: SamplingParams | None = None,
) -> Round:
    """Generate a text for each prompt, all concurrently.

    :param sampling: sampling settings; None: greedy
    """
    sampling = evolve(sampling or SamplingParams.deterministic(), max_len=max_tokens, ignore_eos=True)
    parts: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for place, name, part in _PARTS:
            timed = _timed(getattr(place, name), functools.partial(_add, parts, part))
            stack.enter_context(patch.object(place, name, timed))
        steps, begun = model.stats().steps, time.perf_counter()
        await asyncio.gather(
            *(model.send_completion_request(prompt, sampling, constraint=constraint) for prompt in prompts)
        )
        seconds = time.perf_counter() - begun
    return Round(seconds, model.stats().steps - steps, parts)


def _add(parts: defaultdict[str, float], part: str, seconds: float) -> None:
    parts[part] += seconds


def _timed(function: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            add(time.perf_counter() - begun)

    return timed


def _as_table(name: str, bound: Sequence[Round], plain: Sequence[Round], title: str) -> Table:
    table = Table(title=title)
    for heading in (name, "steps", "ms per step", "share of a plain step"):
        table.add_column(heading, justify="left" if heading == name else "right")
    step = statistics.median(each.seconds / each.steps for each in plain)
    for what, rounds in (("plain", plain), ("constrained", bound)):
        each_step = statistics.median(each.seconds / each.steps for each in rounds)
        table.add_row(what, str(rounds[0].steps), f"{each_step * 1e3:.3f}", f"{each_step / step:.1%}")
    for part in dict.fromkeys(part for _, _, part in _PARTS):
        seconds = statistics.median(each.parts.get(part, 0.0) / each.steps for each in bound)
        table.add_row(f"  {part}", "", f"{seconds * 1e3:.3f}", f"{seconds / step:.1%}")
    return table


def main(
    model: ModelName = "smollm2",
    streams: Streams = 16,
    tokens: Tokens = 96,
    rounds: Rounds = 4,
    constraint: Annotated[list[str] | None, typer.Option(help=", ".join(CONSTRAINTS))] = None,
    threads: Threads = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Compare steps with and without constraints."""
    step_rounds = StepRounds.of(model, streams, rounds, threads)
    console = Console()
    # Seeded, so that all rounds of one kind generate the same texts.
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=7)

    async def run() -> None:
        async with step_rounds.open() as (built, prompts):
            await run_round(built, prompts, 8, None)
            for name in constraint or CONSTRAINTS:
                await run_round(built, prompts, 8, CONSTRAINTS[name])  # compiles the constraint
                bound, plain = [], []
                for _ in range(rounds):
                    plain.append(await run_round(built, prompts, tokens, None, sampling))
                    bound.append(await run_round(built, prompts, tokens, CONSTRAINTS[name], sampling))
                console.print(_as_table(name, bound, plain, step_rounds.title))

    asyncio.run(run())


if __name__ == "__main__":
    typer.run(main)
