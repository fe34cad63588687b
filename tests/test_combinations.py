"""A short form of ``make combinations``, and whether the harness sees what it is there to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
from attrs import evolve

from combinations.combination import Combination
from combinations.configuration import AdapterContent, Checkpoints
from combinations.script import Script
from combinations.task import Change, Task
from combinations.trial import Outcome
from paged_sdk import SamplingParams
from paged_sdk.runner import prompt_reader
from paged_sdk.runner.draft_model import DraftModel
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.step_states import StepStates

SEEDS: Final = (3, 13)
MANY: Final = range(1000, 1300)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("combinations"))


def check(seed: int, checkpoints: Checkpoints) -> None:
    combination = Combination.draw(seed)
    outcome = combination.run(checkpoints)
    told = f"python -m combinations --seed {seed} looks for less that is wrong, too\n{combination}"
    assert not outcome.problems, "\n".join([*outcome.problems, told])


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_those_that_each_request_has_alone(seed: int, checkpoints: Checkpoints) -> None:
    check(seed, checkpoints)


@pytest.mark.long
@pytest.mark.parametrize("seed", MANY)
def test_many_combinations(seed: int, checkpoints: Checkpoints) -> None:
    check(seed, checkpoints)


@pytest.mark.parametrize(
    ("family", "is_exact"),
    [("llama", True), ("glm4_moe", True), ("gemma4_text", True), ("youtu", True), ("lfm2", True), ("falcon_h1", False)],
)
def test_what_runs_in_native_calls_is_compared_bit_by_bit(family: str, *, is_exact: bool) -> None:
    """A model without batch invariance would pass with any last bits."""
    assert evolve(small().configuration, family=family).is_exact == is_exact


def small(*tasks: Task) -> Combination:
    """Return a combination of a llama and a few requests."""
    plain = evolve(
        Combination.draw(0).configuration.plain(),
        family="llama",
        weights="float32",
        is_wide=False,
        cache="auto",
        heals=False,
    )
    return Combination(plain, Script({"first": AdapterContent("of the head", 0)}, tasks))


@pytest.mark.parametrize("asks_models", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_script_is_cut_down_to_the_request_that_is_wrong(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, *, asks_models: bool
) -> None:
    """Scores are computed without the adapter's output projection, as they once were.

    :param asks_models: whether models say of each smaller script that it is wrong, which takes 40 of them
    """
    score = Task(number=1, kind="score", prompts=((5, 6, 7, 8),), adapter="first", salt="a")
    other = Task(number=0, kind="completion", prompts=((5, 6, 7),))
    combination = small(other, score)
    assert not combination.run(checkpoints).problems
    score_spans = prompt_reader._score

    def without_adapters(spans: Sequence[Any], states: StepStates, late: LateResults) -> None:
        score_spans(spans, evolve(states, adapted=None), late)

    monkeypatch.setattr(prompt_reader, "_score", without_adapters)
    (problem,) = combination.run(checkpoints).problems
    assert "request 1, asked alone in two ways: a text's score.logprobs[0]: " in problem
    if not asks_models:

        def run(self: Combination, checkpoints: Checkpoints) -> Outcome:
            through = [
                task for task in self.script.tasks if task.kind == "score" and task.adapter in self.script.adapters
            ]
            return Outcome(problems=["wrong"] * len(through))

        monkeypatch.setattr(Combination, "run", run)
        assert combination.run(checkpoints).problems == ["wrong"]
    shrunk = combination.shrunk(checkpoints, num_tries=1)
    assert shrunk.script.tasks == [evolve(score, salt=None)]
    assert str(shrunk).endswith("  Task(number=1, kind='score', prompts=((5, 6, 7, 8),), adapter='first')")


def test_kv_of_drafts_that_is_left_is_seen(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        Task(number=number, kind="completion", prompts=((5, 6, 7, number),), sampling=SamplingParams(max_len=9, seed=1))
        for number in range(3)
    ]
    combination = small(*texts)
    combination = evolve(combination, configuration=evolve(combination.configuration, proposer="itself", gamma=3))
    assert not combination.run(checkpoints).problems
    monkeypatch.setattr(DraftModel, "forget", lambda self, seq_ids: None)
    (problem,) = combination.run(checkpoints).problems
    assert "texts are followed" in problem


def test_what_a_request_goes_through_follows_from_what_came_before() -> None:
    first, second = AdapterContent("plain", 1), AdapterContent("small", 2)
    tasks = [Task(number=number, kind="embed", prompts=((5,),), adapter="first") for number in range(3)]
    script = Script(
        {"first": first}, (tasks[0], Change(name="first", content=second), tasks[1], Change(name="first"), tasks[2])
    )
    assert script.contents() == {0: first, 1: second, 2: None}
