"""How a smaller model reads texts, and what it does not guess."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import pytest
from torch import Tensor

from drafting import NoDrafts, drafting_model
from paged_sdk import Constraint, Model, SamplingParams, TextModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.runner.draft_model import FIRST_CHUNK, DraftModel
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.step import StepRow
from sequences import make_sequence

LONG: Final = [5 + index % 90 for index in range(2 * FIRST_CHUNK + 20)]


class Steps:
    """Notes how many tokens each step of a smaller model computes."""

    def __init__(self, draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tokens: list[int] = []
        step = draft._step

        def noting(rows: list[StepRow]) -> list[int]:
            self.num_tokens.append(sum(len(row.token_ids) for row in rows))
            return step(rows)

        monkeypatch.setattr(draft, "_step", noting)


def running(seq_id: int, prompt: list[int]) -> Sequence:
    sequence = make_sequence(seq_id, prompt, max_tokens=100)
    sequence.token_ids.append(7)
    return sequence


def test_a_long_text_is_read_over_several_steps(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts beside it get their drafts meanwhile, and it gets the same as if it had been read at once."""
    draft = drafting_model(builder, tiny_checkpoint, gamma=3)
    steps = Steps(draft, monkeypatch)
    sequences = [running(0, LONG), running(1, LONG[3:8])]
    short: list[int] = []
    for computed in (FIRST_CHUNK, 2 * FIRST_CHUNK):
        found, short = draft.propose(sequences)
        assert found == []
        assert len(short) == 3
        assert max(steps.num_tokens) <= FIRST_CHUNK
        assert draft._states[0].num_computed == computed
    sequences[0].token_ids += [9, 11]  # it goes on while it is read
    drafts, again = draft.propose(sequences)
    assert again == short
    whole = drafting_model(builder, tiny_checkpoint, gamma=3)
    monkeypatch.setattr("paged_sdk.runner.draft_model.FIRST_CHUNK", 1000)
    assert [drafts] == whole.propose(sequences[:1])
    assert len(drafts) == 3


def test_reading_takes_as_long_as_a_step_does(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafting_model(builder, tiny_checkpoint, gamma=3)
    steps = Steps(draft, monkeypatch)
    draft._times.note(1, 1e-9)  # no text may be held up
    (found,) = draft.propose([sequence := running(0, LONG)])
    (found,) = draft.propose([sequence])
    assert (found, steps.num_tokens) == ([], [FIRST_CHUNK, 16])
    for _ in range(2):
        draft._times.note(1, 1e9)  # there is all the time in the world
    (found,) = draft.propose([sequence])
    assert len(found) == 3
    assert steps.num_tokens[2] == len(LONG) - FIRST_CHUNK - 16


class Unfinished(Tensor):
    """Stands for a result that a device is still computing: its values are there when the clock reaches a time."""

    clock: ClassVar[Clock]
    ready_at: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, Unfinished):
            result.ready_at = args[0].ready_at
        elif func in (Tensor.item, Tensor.tolist):
            cls.clock.now = max(cls.clock.now, args[0].ready_at)
        return result


class Clock:
    """A clock that stands still, except where the host waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_the_time_of_reading_is_the_devices_and_not_that_of_the_launch(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafting_model(builder, tiny_checkpoint, gamma=3)
    clock = Unfinished.clock = Clock()
    forward = draft._model.forward

    def launch(*args: Any) -> Tensor:
        hidden = forward(*args).as_subclass(Unfinished)
        hidden.ready_at = clock.now + 0.5
        return hidden

    monkeypatch.setattr("paged_sdk.runner.draft_model.time", clock)
    monkeypatch.setattr(draft._model, "forward", launch)
    draft.propose([running(0, LONG)])
    assert draft._seconds_per_token == 0.5 / FIRST_CHUNK


def test_a_text_that_ends_while_it_is_read_leaves_nothing(builder: TextModelBuilder, tiny_checkpoint: Path) -> None:
    draft = drafting_model(builder, tiny_checkpoint, gamma=3)
    sequence = running(0, LONG)
    assert draft.propose([sequence]) == [[]]
    draft.forget([0])
    assert draft.num_followed == 0
    assert draft._kv.usage.used == 0


def test_blocks_of_a_draft_model_do_not_wait_to_be_stored(
    builder: TextModelBuilder, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    draft = drafting_model(builder.with_prefix_cache_dir(tmp_path), tiny_checkpoint, gamma=3)
    sequence = running(0, LONG)
    assert any(draft.propose([sequence])[0] for _ in range(4))
    draft.forget([0])
    assert draft._kv.usage.cached > 0
    assert draft._kv.take_published() == []


def test_nothing_is_guessed_from_logits_that_are_not_finite(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has a number for them that is no token, and that no model can compute."""
    draft = drafting_model(builder, tiny_checkpoint, gamma=3)
    results = iter([[7], [NOT_DRAWN], [8], [9], [10]])
    monkeypatch.setattr(draft, "_step", lambda rows: next(results))
    sequence = running(0, LONG[:8])
    assert draft.propose([sequence]) == [[7]]
    sequence.token_ids += [7, 11]
    assert draft.propose([sequence]) == [[8, 9, 10]]


class Watched:
    """Checks that all guesses of another proposer may follow."""

    def __init__(self, proposer: Proposer) -> None:
        self.lengths: list[int] = []
        self._proposer = proposer

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        found = self._proposer.propose(sequences)
        for sequence, drafts in zip(sequences, found, strict=True):
            assert sequence.request.grammar is not None
            text = sequence.request.grammar.begin((), 0)
            text.tokens += sequence.output_token_ids
            assert not text.move_to(sequence.num_output_tokens)
            assert text.num_allowed(drafts) == len(drafts)
            self.lengths.append(len(drafts))
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        self._proposer.forget(seq_ids)

    def reset(self) -> None:
        self._proposer.reset()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_guess_follows_one_that_the_constraint_refuses(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"constraint": Constraint.regex("[a-f ]{30,60}|[g-z ]{30,60}")}

    async def text(proposer: Proposer) -> str:
        parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
        async with Model(parts) as model:
            sampling = SamplingParams(temperature=0.0, max_len=40)
            return (await model.send_completion_request([5, 6, 7, 8], sampling, **settings)).choices[0].text

    draft = drafting_model(builder, tiny_checkpoint, gamma=4)
    steps, watched = Steps(draft, monkeypatch), Watched(draft)
    assert await text(watched) == await text(NoDrafts())
    asked = [length for length in watched.lengths if length < 4]
    assert asked, "the model's own likeliest tokens are sentences by themselves"
    # One step for each guess, and one for the guess that was refused: none is made after it.
    assert len(steps.num_tokens) <= sum(watched.lengths) + len(asked)


def test_kernels_that_drafts_wait_for_are_noticed(
    builder: TextModelBuilder, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the first step, which reads, and of the second, which guesses."""
    draft, found = drafting_model(builder, tiny_checkpoint, gamma=1), dict[str, int]()
    kernels: Any = SimpleNamespace(by_name=lambda: dict(found), total=0)
    draft.compilations = LiveCompilations(kernels)
    step = draft._step

    def compiling(rows: list[StepRow]) -> list[int]:
        kernels.total += 1
        found[f"_kernel_{kernels.total}"] = 1
        return step(rows)

    monkeypatch.setattr(draft, "_step", compiling)
    draft.propose([running(0, LONG), running(1, LONG[3:8])])
    assert draft.compilations.count == 2
    assert "(_kernel_1): 1 since" in caplog.text
    assert "(_kernel_2): 2 since" in caplog.text
