"""Generate greedy tokens of many models, and compare them between two versions of the package.

python -m benchmarks.greedy_tokens --out after.json [--model smollm2 ...]
python -m benchmarks.greedy_tokens --compare before.json after.json

Refactorings and faster kernels must not change greedy texts. Each model generates from the same prompts one after
another and all concurrently, with every kind of KV cache. For texts generated alone, the lead of each token over the
second best is stored too, so that a comparison can tell whether a difference was nearly a tie.

Only public names of the package are used, so `PYTHONPATH=OTHER/src:. python -m benchmarks.greedy_tokens` measures
another version. Texts generated concurrently may depend on which requests share a step, except with batch invariance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Final

from attrs import asdict, frozen

from benchmarks.models import MODELS, model_path
from paged_sdk import (
    GgufModelBuilder,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
)

__all__ = ["Text", "compare", "generate", "main"]

NUM_TOKENS: Final = 48
NUM_TOGETHER: Final = 16

Builder = TextModelBuilder | GgufModelBuilder
Prompt = str | list[int]


@frozen
class Text:
    """Holds the greedy tokens of one prompt.

    :ivar key: the model, the kind of KV cache, alone or together, and the prompt's number
    :ivar leads: log-probability of each token minus that of the second best; empty: not known
    """

    key: str
    token_ids: list[int]
    leads: list[float]


@frozen
class Case:
    """Holds one model and its prompts.

    :ivar num_alone: number of prompts that are also answered one after another
    """

    name: str
    builder: Builder
    prompts: Sequence[Prompt]
    num_alone: int


def _kv_modes(builder: Builder) -> dict[str, Builder]:
    fp8 = PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3)
    return {
        "paged": builder,
        "FP8": builder.with_paged_attn(fp8),
        "contiguous": builder.without_paged_attn(),
        "batch-invariant": builder.with_batch_invariance(),
    }


def _texts() -> list[Prompt]:
    """Return the beginnings of articles, of 5 to 1,500 characters."""
    names = sorted(name for name, text in topics.items() if len(text) > 2000)
    return [topics[name].strip()[: 5 + 100 * index] for index, name in enumerate(names[:NUM_TOGETHER])]


def _random_ids(vocab_size: int) -> list[Prompt]:
    draw = random.Random(0)
    lengths = (1, 2, 7, 31, 32, 33, 64, 65, 90, 127, 128, 200, 3, 12, 13, 50)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def _real_cases(names: Sequence[str]) -> Iterator[Case]:
    for name in names:
        file = model_path(name)
        builder = GgufModelBuilder(file).with_force_cpu()
        # Fewer prompts for larger models, so that these do not take most of the time.
        prompts, num_alone = (_texts(), 12) if file.stat().st_size < 500e6 else (_texts()[4:8], 4)
        yield Case(name, builder, prompts, num_alone)


def _tiny_cases(folder: Path) -> Iterator[Case]:
    """Return every native family with random weights, in float32, and from GGUF blocks."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import tiny

    for family in tiny.FAMILIES:
        checkpoint = tiny.make_checkpoint(family, folder / family)
        file = tiny.make_gguf(folder / f"{family}-gguf", family=family, quantization="Q8_0")
        builders: dict[str, Builder] = {
            f"tiny {family}": TextModelBuilder(checkpoint).with_dtype("float32"),
            f"tiny {family}, Q8_0": GgufModelBuilder(file),
        }
        for name, builder in builders.items():
            yield Case(name, builder.with_force_cpu().with_num_threads(1), _random_ids(tiny.VOCAB_SIZE), 12)


async def _tokens(model: Model, prompt: Prompt, *, leads: bool = False) -> tuple[list[int], list[float]]:
    sampling = SamplingParams(temperature=0, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=2)
    response = await model.send_completion_request(prompt, sampling)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    token_ids = [each.token_id for each in logprobs.content]
    if not leads:
        return token_ids, []
    return token_ids, [each.top_logprobs[0].logprob - each.top_logprobs[1].logprob for each in logprobs.content]


async def generate(case: Case) -> list[Text]:
    """Generate all texts of one model.

    Builds that this version of the package refuses are left out, and reported on stderr.
    """
    found = []
    for mode, builder in _kv_modes(case.builder).items():
        try:
            built = await builder.with_prefix_cache_n(None).with_max_num_seqs(NUM_TOGETHER).build()
        except ValueError as error:
            print(f"{case.name}, {mode}: {error}", file=sys.stderr)
            continue
        async with built as model:
            for index, prompt in enumerate(case.prompts[: case.num_alone]):
                token_ids, leads = await _tokens(model, prompt, leads=True)
                found.append(Text(f"{case.name}, {mode}, alone, {index}", token_ids, leads))
            together = await asyncio.gather(*(_tokens(model, prompt) for prompt in case.prompts))
            for index, (token_ids, _) in enumerate(together):
                found.append(Text(f"{case.name}, {mode}, together, {index}", token_ids, []))
    return found


def compare(before: Mapping[str, Text], after: Mapping[str, Text], say: Callable[[str], None] = print) -> int:
    """Report which texts differ, in one line per model and way, and return their number.

    Texts that only one side has are reported too, and do not count as different.
    """
    different: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
    common = before.keys() & after.keys()
    for key in common:
        one, other = before[key], after[key]
        if one.token_ids != other.token_ids:
            at = _first_difference(one.token_ids, other.token_ids)
            different[_way(key)].append((at, one.leads[at] if at < len(one.leads) else None))
    totals = Counter(map(_way, common))
    for way in sorted(different):
        leads = [lead for _, lead in different[way] if lead is not None]
        which = f", where the first leads by at most {max(leads):.4f}" if leads else ""
        first = min(at for at, _ in different[way])
        say(f"{way}: {len(different[way])} of {totals[way]} differ, from token {first} on{which}")
    for way, count in sorted(Counter(map(_way, before.keys() ^ after.keys())).items()):
        say(f"{way}: {count} only on one side")
    num_different = sum(map(len, different.values()))
    say(f"{num_different} of {len(common)} texts differ")
    return num_different


def _way(key: str) -> str:
    """Return a text's key without the number of its prompt."""
    return key.rpartition(", ")[0]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    unequal = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


def _read(path: Path) -> dict[str, Text]:
    return {row["key"]: Text(**row) for row in json.loads(path.read_text())}


def main() -> None:
    """Generate or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the tokens, JSON")
    parser.add_argument(
        "--model", action="append", help=f"tiny, {', '.join(MODELS)}, or the path of a GGUF file; may be repeated"
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = map(_read, arguments.compare)
        sys.exit(1 if compare(before, after) else 0)
    names = arguments.model or ["tiny", "smollm2", "qwen1.5b"]
    with TemporaryDirectory() as folder:
        cases = [*(_tiny_cases(Path(folder)) if "tiny" in names else ())]
        cases += _real_cases([name for name in names if name != "tiny"])
        found: list[Text] = []
        for case in cases:
            found += asyncio.run(generate(case))
            print(f"{case.name}: {len(found)} texts so far", file=sys.stderr)
    text = json.dumps([asdict(each) for each in found], indent=0)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
