"""Combine whoever proposes drafts with everything else that a request and a model can ask for.

python tests/compose.py    writes the table of docs/speculation.md, after all texts of the matrix have been compared
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn, TypeAlias

import pytest
import torch
from attrs import evolve, frozen
from transformers import PreTrainedModel

from adapter_files import write_adapter
from arrivals import wait_for_requests
from drafting import NoDrafts, drafting, drafting_model
from paged_sdk import (
    AdapterError,
    CompletionResponse,
    ConfigError,
    Constraint,
    InvalidRequestError,
    IsqType,
    MemoryGpuConfig,
    Model,
    ModelStats,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from paged_sdk.attention.backend import AttentionSetup
from paged_sdk.attention.choice import Candidate
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.config.sampling import DryParams
from paged_sdk.errors import PagedError
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.speculative.forced_tokens import ForcedTokens
from paged_sdk.speculative.several_proposers import SeveralProposers
from rank_threads import ranks_as_threads
from tiny import build_model, make_checkpoint

__all__ = [
    "CASES",
    "MODES",
    "PROPOSERS",
    "REFUSED_BY_RANKS",
    "Case",
    "Matrix",
    "Through",
    "covering",
    "pairs",
    "some_of",
    "table",
]

PROPOSERS: Final = {
    "none": "no drafts",
    "suffix": "suffix",
    "prediction": "prediction",
    "model": "draft model",
    "grammar": "forced tokens",
    "all": "all of them",
}
PREDICTED: Final = ("prediction", "all")
CONSTRAINTS: Final[Mapping[str, Constraint | None]] = {
    "no constraint": None,
    "JSON schema": Constraint.json_schema(
        {
            "type": "object",
            "properties": {
                "on_the_sea": {"type": "boolean"},
                "kind": {"enum": ["a village of farmers", "a village of fishermen"]},
                "names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
            },
            "required": ["on_the_sea", "kind", "names"],
            "additionalProperties": False,
        },
        compact=True,
    ),
    "regex": Constraint.regex("(the first (one|two|three) of them, ){1,3}and the last"),
}
_GREEDY: Final = SamplingParams(temperature=0.0, max_len=32, ignore_eos=True)
_DRAWN: Final = evolve(_GREEDY, temperature=0.8, seed=9)  # which repeats itself: some suffix drafts are right
SAMPLINGS: Final = {
    "greedy": _GREEDY,
    "temperature, seed": _DRAWN,
    "min-p": evolve(_DRAWN, min_p=0.05, top_p=0.95),
    "penalties": evolve(_GREEDY, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1),
    "DRY": evolve(_GREEDY, dry_params=DryParams(multiplier=0.8)),
    "bias": evolve(_DRAWN, logits_bias={7: 3.0, 9: -3.0}),
    "logprobs": evolve(_GREEDY, top_n_logprobs=2),
    "choices": evolve(_DRAWN, n_choices=2),
}
STOPS: Final[Mapping[str, tuple[str, ...]]] = {"no stop string": (), "stop strings": ("e", "two", "farm")}
_ROOMY: Final = MemoryGpuConfig.ContextSize(6000)
_SMALL: Final = MemoryGpuConfig.ContextSize(72)
_KINDS: Final = {"FP8": PagedCacheType.F8E4M3, "4 bits": PagedCacheType.Q4}
MODES: Final = (
    "paged",
    "FP8",
    "no prefix cache",
    "contiguous",
    "paged, preempted",
    "4 bits, preempted",
    "paged, preempted, pinned",
    "FP8, preempted, stored",
    "paged, two ranks",
    "contiguous, two ranks",
    "FP8, preempted, two ranks",
)
REFUSED_BY_RANKS: Final[Mapping[str, type[PagedError]]] = {
    "attention backend": ConfigError,
    "calibration file": ConfigError,
    "divided draft model": ConfigError,
    "magnitudes of divided columns": AdapterError,
}
"""What a model of several ranks does not go together with, and what says so."""
_PREEMPTED: Final = "preempted"
_PINNED: Final = "pinned"
_HELD: Final = "first one, second one, and the last of them"
"""Is pinned: it takes a third of the small pool from the requests."""
_STORED: Final = "stored"
_RANKS: Final = "two ranks"
_PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5)
_ADAPTER: Final = "adapter"
_LENGTH: Final = 100
_BEGIN: Final = "<!-- compose: begin -->"
_END: Final = "<!-- compose: end -->"


OVERRIDES: Final[dict[str, Any]] = {"head_dim": 32}
"""In what the config of the llama departs from the tiny one's: 4-bit keys and values have scales of 32 elements."""


Through: TypeAlias = Callable[[Model], AbstractAsyncContextManager[Model]]


def llama_checkpoint(directory: Path) -> Path:
    """Write the llama's checkpoint."""
    return make_checkpoint("llama", directory, **OVERRIDES)


@frozen
class Case:
    """Describes a request, by the names of its settings."""

    constraint: str
    sampling: str
    stop: str

    @property
    def params(self) -> SamplingParams:
        return evolve(SAMPLINGS[self.sampling], stop=STOPS[self.stop])

    @property
    def is_whole(self) -> bool:
        """Say whether a text of it has all the tokens that it may have."""
        return CONSTRAINTS[self.constraint] is None and not STOPS[self.stop]

    def is_refused(self, proposer: str) -> bool:
        """Say whether a request of it with a prediction is an error: a prediction is of one text."""
        return proposer in PREDICTED and self.sampling == "choices"


CASES: Final = tuple(Case(*names) for names in itertools.product(CONSTRAINTS, SAMPLINGS, STOPS))


def pairs(proposer: str, mode: str, case: Case) -> frozenset[tuple[str, str]]:
    """Return the pairs of settings that a case has, of a model and who proposes its drafts."""
    names = (proposer, mode, case.constraint, case.sampling, case.stop)
    return frozenset(itertools.combinations(names, 2))


def covering(num_cases: int) -> dict[tuple[str, str], list[Case]]:
    """Choose some cases for each proposer and mode, so that all pairs of settings are among them that are not refused.

    :param num_cases: how many for each; where sequences are to be preempted, two more
    """
    models, random_order = list(itertools.product(PROPOSERS, MODES)), random.Random(0)
    allowed = {proposer: [case for case in CASES if not case.is_refused(proposer)] for proposer in PROPOSERS}
    missing = set().union(*(pairs(proposer, mode, case) for proposer, mode in models for case in allowed[proposer]))
    chosen: dict[tuple[str, str], list[Case]] = {}
    for proposer, mode in models:
        cases = random_order.sample(allowed[proposer], len(allowed[proposer]))
        own = chosen.setdefault((proposer, mode), [])
        for num_left in reversed(range(num_cases + 2 * (_PREEMPTED in mode))):
            # Where few are asked for, some must still be preempted: one text at least is to be cut short by nothing.
            lacks_whole = _PREEMPTED in mode and not num_left and not any(case.is_whole for case in own)
            if missing and not lacks_whole:
                best = max(cases, key=lambda case: len(pairs(proposer, mode, case) & missing))
            else:
                best = next(case for case in cases if case.is_whole)
            cases.remove(best)
            missing -= pairs(proposer, mode, best)
            own.append(best)
    assert not missing, missing
    return chosen


def some_of(chosen: Mapping[tuple[str, str], list[Case]]) -> dict[tuple[str, str], list[Case]]:
    """Return a third of the models of :func:`covering`: of every proposer and of every mode two at least. Of the three
    thirds it is the one in which each proposer's drafts are partly right.
    """
    places = itertools.product(range(len(PROPOSERS)), range(len(MODES)))
    models = itertools.product(PROPOSERS, MODES)
    return {
        model: chosen[model]
        for (proposer, mode), model in zip(places, models, strict=True)
        if (proposer + mode) % 3 == 2
    }


def _in_mode(builder: TextModelBuilder, mode: str, directory: Path) -> TextModelBuilder:
    """Return the builder of a mode.

    :param directory: where the prefix cache is stored, if it is
    """
    builder = builder.with_max_model_len(_LENGTH)
    if _STORED in mode:
        builder = builder.with_prefix_cache_dir(directory)
    if _RANKS in mode:
        builder = builder.with_tensor_parallel(2)
    if mode.startswith("contiguous"):
        return builder.without_paged_attn()
    pool = _SMALL if _PREEMPTED in mode else _ROOMY
    kind = _KINDS.get(_plainly(mode), PagedCacheType.AUTO)
    builder = builder.with_paged_attn(PagedAttentionMeta(block_size=4, gpu_memory=pool, cache_type=kind))
    return builder.with_prefix_cache_n(None) if mode == "no prefix cache" else builder


def _plainly(mode: str) -> str:
    """Return the mode of one process that has room for all, whose texts those of a mode have to be."""
    return mode.partition(",")[0]


def _said(response: CompletionResponse) -> list[Any]:
    """Return all of an answer that drafts might change."""
    found: list[Any] = [response.usage.completion_tokens, response.usage.completion_tokens_details.forced_tokens]
    for choice in response.choices:
        entries = () if choice.logprobs is None else choice.logprobs.content
        # How many tokens share a step decides the last bits of a sum.
        logprobs = [pytest.approx(entry.logprob, abs=1e-3) for entry in entries]
        found.append((choice.text, choice.finish_reason, [entry.token for entry in entries], logprobs))
    return found


class Matrix:
    """Compares texts with drafts, or of several ranks, to those without, of a tiny model with random weights.

    The second of the prompts goes through an adapter.

    :param directory: the model's checkpoint
    :param base: the checkpoint's model, if it is no llama
    :param through: what requests go to a model through, those with drafts; None: nothing
    :ivar num_restored: how many tokens' KV came back from a directory
    :ivar counts: how many tokens each proposer has drafted, how many of these were accepted, and how many were forced
    """

    def __init__(
        self,
        directory: Path,
        *,
        base: PreTrainedModel | None = None,
        through: Through | None = None,
    ) -> None:
        self._through = through
        self.counts: dict[str, Counter[str]] = {}
        self.num_restored: int = 0
        self._directory = directory
        self._stored = directory / "kv"
        builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
        base = build_model("llama", **OVERRIDES) if base is None else base
        self._builder = builder.with_adapter(write_adapter(directory / _ADAPTER, base, strength=0.05))
        self._plain: dict[tuple[str, Case], list[Any]] = {}
        self._texts: dict[tuple[str, Case], list[str]] = {}

    def compare(self, proposer: str, mode: str, cases: Sequence[Case]) -> int:
        """Compare cases of a model in one mode, all of whose requests are sent at once.

        :returns: how many answers were compared
        :raises AssertionError: one is another than without drafts, of one process with room for all
        """
        roomy = _plainly(mode)
        missing = [case for case in cases if (roomy, case) not in self._plain]
        if missing:
            asyncio.run(self._run("none", self._make("none", roomy), roomy, missing, is_plain=True))
        asked = [case for case in cases if not case.is_refused(proposer)]
        refused = [case for case in CASES if case.is_refused(proposer)]
        answers, stats = asyncio.run(self._run(proposer, self._make(proposer, mode), mode, asked, refused))
        for case in asked:
            assert answers[case] == self._plain[roomy, case], (proposer, mode, case)
        assert stats.blocks_used == 0, stats
        assert (stats.preemptions > 0) == (_PREEMPTED in mode), (proposer, mode, stats)
        assert stats.prefix_restored == 0 or _STORED in mode
        self.num_restored += stats.prefix_restored
        own = self.counts.setdefault(proposer, Counter())
        own.update(drafted=stats.drafted_tokens, accepted=stats.accepted_tokens, forced=stats.forced_tokens)
        return len(asked) * len(_PROMPTS)

    def build(self, what: str, num_ranks: int) -> None:
        """Build a model with something of :data:`REFUSED_BY_RANKS`, and close it.

        :raises PagedError: it is refused
        """
        plain = self._builder.with_max_model_len(_LENGTH)
        builder = plain.with_tensor_parallel(num_ranks)
        source, settings, backends = builder.source, builder.settings, []
        match what:
            case "attention backend":
                why_not = "it is another's turn"
                backends = [
                    Candidate(name="own", paged=True, device_type=None, why_not=lambda _: why_not, storage=_never)
                ]
            case "calibration file":
                text = self._directory / "calibration.txt"
                text.write_text("the first of them, and the last " * 40)
                settings = builder.with_dtype("auto").with_isq(IsqType.Q4_0).with_calibration_file(text).settings
            case "divided draft model":
                drafter = TextModelBuilder(self._directory).with_force_cpu().with_tensor_parallel(num_ranks)
                settings = TextSpeculativeBuilder(plain, drafter, SpeculativeConfig(gamma=2)).settings
            case "magnitudes of divided columns":
                adapter = self._directory / "magnitudes"
                write_adapter(adapter, build_model("llama", **OVERRIDES), targets=("lm_head",), use_dora=True)
                settings = builder.with_adapter(adapter).settings
        with ranks_as_threads():
            load_parts(source, settings, read_environment({}), backends=backends).engine.close()

    def _make(self, proposer: str, mode: str) -> Proposer:
        match proposer:
            case "none":
                return NoDrafts()
            case "suffix":
                return drafting()
            case "prediction":
                return drafting(looks_back=False)
            case "grammar":
                return ForcedTokens(NoDrafts())
        model = drafting_model(_in_mode(self._builder, _plainly(mode), self._stored), self._directory, gamma=3)
        return model if proposer == "model" else SeveralProposers((ForcedTokens(drafting()), model))

    async def _run(
        self,
        name: str,
        proposer: Proposer | None,
        mode: str,
        cases: Sequence[Case],
        refused: Sequence[Case] = (),
        *,
        is_plain: bool = False,
    ) -> tuple[dict[Case, list[Any]], ModelStats]:
        builder = _in_mode(self._builder, mode, self._stored)
        with ranks_as_threads():
            parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
        through = nullcontext if is_plain or self._through is None else self._through
        async with Model(parts) as own, through(own) as model:

            async def ask(case: Case, number: int) -> CompletionResponse:
                options: dict[str, Any] = {"adapter": _ADAPTER if number else None}
                if CONSTRAINTS[case.constraint] is not None:
                    options["constraint"] = CONSTRAINTS[case.constraint]
                if name in PREDICTED:
                    text = self._texts[_plainly(mode), case][number]
                    # What is expected departs from the answer, comes back to it, and goes beyond.
                    options["prediction"] = f"{text[: len(text) // 3]}?{text[len(text) // 2 :]} and more"
                return await model.send_completion_request(_PROMPTS[number], case.params, **options)

            pin = await model.pin([{"role": "user", "content": _HELD}]) if _PINNED in mode else None
            asked = list(itertools.product(cases, range(len(_PROMPTS))))
            wait_for_requests(own, len(asked))  # so that they compete for memory
            responses = await asyncio.gather(*(ask(case, number) for case, number in asked))
            for case in refused:
                with pytest.raises(InvalidRequestError, match="n_choices"):
                    await model.send_completion_request(_PROMPTS[0], case.params, prediction="a text")
            if pin is not None:
                assert pin.num_tokens == _SMALL.tokens / 3
                await pin.aclose()
            stats = model.stats()
        found: dict[Case, list[Any]] = {case: [] for case in cases}
        for (case, _), response in zip(asked, responses, strict=True):
            found[case].append(_said(response))
            if is_plain:
                self._texts.setdefault((mode, case), []).append(response.choices[0].text)
        if is_plain:
            self._plain |= {(mode, case): answers for case, answers in found.items()}
        return found, stats


def _never(setup: AttentionSetup) -> NoReturn:
    raise AssertionError("it says that it cannot")


def table() -> str:
    """Return the part of docs/speculation.md that says what goes together."""
    lines = [
        f"| | {' | '.join(PROPOSERS.values())} |",
        "|---|" + "---|" * len(PROPOSERS),
    ]
    for name in (*CONSTRAINTS, *SAMPLINGS, *STOPS, *MODES):
        cells = []
        for proposer in PROPOSERS:
            refused = all(case.is_refused(proposer) for case in CASES if name in (case.constraint, case.sampling))
            cells.append("refused" if refused and name in SAMPLINGS else str(_count(proposer, name)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _count(proposer: str, name: str) -> int:
    """Return how many answers the whole matrix compares that have a setting."""
    cases = [case for case in CASES if not case.is_refused(proposer)]
    if name in MODES:
        return len(cases) * len(_PROMPTS)
    having = [case for case in cases if name in (case.constraint, case.sampling, case.stop)]
    return len(having) * len(_PROMPTS) * len(MODES)


def with_table(page: str) -> str:
    """Return a page with the table between its marks."""
    marked = re.compile(f"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}", re.DOTALL)
    assert marked.search(page), "the page has no place for the table"
    return marked.sub(lambda _: f"{_BEGIN}\n{table()}{_END}", page)


def main() -> None:
    """Compare everything with everything, and write the table."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        matrix = Matrix(llama_checkpoint(Path(directory)))
        num_compared = 0
        for proposer, mode in itertools.product(PROPOSERS, MODES):
            num_compared += matrix.compare(proposer, mode, CASES)
            print(f"{proposer}, {mode}: all texts are the same", flush=True)
    page = Path(__file__).parent.parent / "docs" / "speculation.md"
    page.write_text(with_table(page.read_text()))
    print(f"{num_compared} answers compared; wrote {page.name}")


if __name__ == "__main__":
    main()
