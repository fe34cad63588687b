"""Count how often greedy texts change when they are generated again, or in a batch with others.

python -m benchmarks.same_texts --model smollm2 --prompts 200

Every prompt is sent three times in succession; the first time, nothing of it is cached. Then it is sent together with
others, and during the prefill of a long prompt. Texts are equal if their tokens are; the change of the first token's
logprob is reported too.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.models import model_path
from benchmarks.paths import cache_directory
from benchmarks.prompts import prose
from paged_sdk import Model, SamplingParams, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["Difference", "measure"]

_SHORTEST: Final = 5
_LONGEST: Final = 200
_LONG: Final = 3000  # tokens of the long prompt


@frozen(kw_only=True)
class Difference:
    """Compares texts with those that were generated first, alone.

    :ivar different: how many of ``texts`` have other tokens
    :ivar moved: how many have another logprob anywhere, even if their tokens are equal
    :ivar first_token: largest difference of a first token's logprob
    """

    texts: int
    different: int
    moved: int
    first_token: float


@frozen
class _Text:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def _prompts(token_ids: Sequence[int], count: int) -> list[list[int]]:
    """Cut prompts of random lengths out of a text, from different places, so that none is a prefix of another."""
    draw = random.Random(0)
    starts = draw.sample(range(len(token_ids) - _LONGEST), count)
    return [list(token_ids[start : start + draw.randint(_SHORTEST, _LONGEST)]) for start in starts]


async def _ask(model: Model, prompt: Sequence[int], num_tokens: int) -> _Text:
    sampling = SamplingParams(temperature=0, max_len=num_tokens, ignore_eos=True, top_n_logprobs=0)
    response = await model.send_completion_request(list(prompt), sampling)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    return _Text(tuple(each.token_id for each in logprobs.content), tuple(each.logprob for each in logprobs.content))


async def _among(model: Model, prompts: Sequence[Sequence[int]], streams: int, num_tokens: int) -> list[_Text]:
    texts: list[_Text] = []
    for first in range(0, len(prompts), streams):
        await model.reset_prefix_cache()
        texts += await asyncio.gather(*(_ask(model, each, num_tokens) for each in prompts[first : first + streams]))
    return texts


async def _beside_prefills(
    model: Model, prompts: Sequence[Sequence[int]], long: Sequence[int], num_tokens: int
) -> list[_Text]:
    texts = []
    for prompt in prompts:
        await model.reset_prefix_cache()
        _, text = await asyncio.gather(_ask(model, long, 1), _ask(model, prompt, num_tokens))
        texts.append(text)
    return texts


def _difference(expected: Sequence[_Text], texts: Sequence[_Text]) -> Difference:
    pairs = list(zip(expected, texts, strict=False))
    return Difference(
        texts=len(pairs),
        different=sum(one.token_ids != other.token_ids for one, other in pairs),
        moved=sum(one != other for one, other in pairs),
        first_token=max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs),
    )


async def measure(
    model: Model, token_ids: Sequence[int], *, prompts: int, num_tokens: int, streams: Sequence[int]
) -> dict[str, Difference]:
    """Generate texts alone, again, batched with others, and during long prefills.

    :param token_ids: tokens of a text from which prompts are cut
    """
    asked = _prompts(token_ids, prompts)
    first = [await _ask(model, prompt, num_tokens) for prompt in asked]
    found = {}
    for time in ("second", "third"):
        found[f"alone, the {time} time"] = _difference(first, [await _ask(model, each, num_tokens) for each in asked])
    for count in streams:
        found[f"among {count}"] = _difference(first, await _among(model, asked, count, num_tokens))
    long = token_ids[: min(_LONG, len(token_ids))]
    # A long prefill takes as long as ten short texts.
    some = asked[:: max(1, prompts // 20)]
    expected = first[:: max(1, prompts // 20)]
    found["beside a long prefill"] = _difference(expected, await _beside_prefills(model, some, long, num_tokens))
    return found


def _rows(found: dict[str, Difference]) -> Iterator[tuple[str, ...]]:
    for name, each in found.items():
        yield name, f"{each.different} of {each.texts}", str(each.moved), f"{each.first_token:.4f}"


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    prompts: Annotated[int, typer.Option(min=1)] = 200,
    num_tokens: Annotated[int, typer.Option(min=1, help="Length of the greedy texts")] = 48,
    streams: Annotated[list[int] | None, typer.Option(help="Texts at a time; may be repeated")] = None,
    invariant: Annotated[bool, typer.Option(help="Build the model with_batch_invariance()")] = False,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Count the texts that differ from those that were asked for first."""
    path = model_path(model)
    builder = TextModelBuilder(path).with_num_threads(threads or usable_processors())
    if invariant:
        builder = builder.with_batch_invariance()

    async def run() -> dict[str, Difference]:
        async with builder.build() as built:
            token_ids = await built.tokenize(prose())
            return await measure(
                built, token_ids, prompts=prompts, num_tokens=num_tokens, streams=streams or [8, 12, 16]
            )

    found = asyncio.run(run())
    report = {
        "command": " ".join(["python -m benchmarks.same_texts", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": path.name,
        "differences": {name: asdict(each) for name, each in found.items()},
    }
    target = output or cache_directory("results") / f"{path.stem}-same-texts.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    table = Table(title=f"{path.name}: greedy texts of {num_tokens} tokens that differ from the first")
    for heading in ("", "other tokens", "other logprobs", "first token's logprob"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in _rows(found):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
