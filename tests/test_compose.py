"""Whoever proposes drafts goes together with every constraint, way to sample, kind of KV memory, preemption and
several ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoModelForCausalLM

from compose import (
    CASES,
    CONSTRAINTS,
    MODES,
    PROPOSERS,
    REFUSED_BY_RANKS,
    SAMPLINGS,
    STOPS,
    Case,
    Matrix,
    covering,
    llama_checkpoint,
    pairs,
    some_of,
    with_table,
)
from test_recurrent_models import CONFIGS as RECURRENT
from tiny import make_other_checkpoint

PAGE: Final = Path(__file__).parent.parent / "docs" / "speculation.md"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


def compare(directory: Path, chosen: Iterable[tuple[tuple[str, str], list[Case]]]) -> None:
    matrix = Matrix(directory)
    for (proposer, mode), cases in chosen:
        assert matrix.compare(proposer, mode, cases) > 0
    assert matrix.num_restored > 0
    for proposer, counts in matrix.counts.items():
        assert counts["forced"] > 0
        guesses = proposer not in ("none", "grammar")
        assert (counts["drafted"] > counts["accepted"] > 0) == guesses
        assert guesses or counts["drafted"] == 0


def test_settings_go_together(llama: Path) -> None:
    compare(llama, some_of(covering(2)).items())


@pytest.mark.long
def test_all_pairs_of_settings_go_together(llama: Path) -> None:
    compare(llama, covering(2).items())


def test_every_setting_is_among_some_of_them() -> None:
    """Every proposer and mode with two of the others at least, and every setting of a request with ten models."""
    models = some_of(covering(2))
    assert len(models) == 22
    for proposer in PROPOSERS:
        assert sum(proposer == each for each, _ in models) >= 2
    for mode in MODES:
        assert sum(mode == each for _, each in models) >= 2
    for name in (*CONSTRAINTS, *SAMPLINGS, *STOPS):
        having = [cases for cases in models.values() if any(name in (c.constraint, c.sampling, c.stop) for c in cases)]
        assert len(having) >= 2, name


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def test_what_recurrent_layers_go_together_with(family: str, tmp_path: Path) -> None:
    """All but ranks, stored blocks and pins."""
    model = make_other_checkpoint(family, tmp_path, **RECURRENT[family], hidden_size=128, head_dim=32)
    matrix = Matrix(model, base=AutoModelForCausalLM.from_pretrained(model))
    for (proposer, mode), cases in covering(2).items():
        if not any(each in mode for each in ("ranks", "stored", "pinned")):
            assert matrix.compare(proposer, mode, cases) > 0
    guessed = {proposer for proposer, counts in matrix.counts.items() if counts["accepted"] + counts["forced"]}
    assert guessed >= set(PROPOSERS) - {"none"}


@pytest.mark.long
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_everything_goes_together(llama: Path, proposer: str) -> None:
    compare(llama, [((proposer, mode), list(CASES)) for mode in MODES])


@pytest.mark.parametrize("what", REFUSED_BY_RANKS)
def test_ranks_refuse_what_they_do_not_go_together_with(llama: Path, what: str) -> None:
    matrix = Matrix(llama)
    matrix.build(what, num_ranks=1)
    with pytest.raises(REFUSED_BY_RANKS[what]):
        matrix.build(what, num_ranks=2)


def test_no_pair_is_left_out() -> None:
    possible: set[tuple[str, str]] = set()
    for proposer, mode, case in itertools.product(PROPOSERS, MODES, CASES):
        if not case.is_refused(proposer):
            possible |= pairs(proposer, mode, case)
    chosen = covering(2)
    assert possible == {
        pair for (proposer, mode), cases in chosen.items() for case in cases for pair in pairs(proposer, mode, case)
    }
    assert len(possible) > 200
    assert sum(map(len, chosen.values())) < 0.1 * len(PROPOSERS) * len(MODES) * len(CASES)


def test_the_published_table_is_the_one_that_is_tested() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run python tests/compose.py"
