"""The combinations of parameters that are left have every pair of values, or every value, that all have."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Final

import pytest

from thinning import chosen, left_out

SIZES: Final = (5, 2, 4, 2)


def parts(combination: tuple[int, ...], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), strength))


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 24), (4, 80)])
def test_all_parts_are_among_few(strength: int, most: int) -> None:
    everything = list(itertools.product(*map(range, SIZES)))
    kept = [everything[place] for place in chosen(everything, strength)]
    assert set().union(*(parts(each, strength) for each in kept)) == set().union(
        *(parts(each, strength) for each in everything)
    )
    assert len(kept) <= most
    counts = [sum(each[1] == value for each in kept) for value in range(SIZES[1])]
    assert min(counts) > 0.3 * len(kept)


def test_combinations_that_are_missing_are_not_asked_for() -> None:
    rng = random.Random(0)
    some = [each for each in itertools.product(*map(range, SIZES)) if rng.random() < 0.3]
    kept = [some[place] for place in chosen(some, 2)]
    assert set().union(*(parts(each, 2) for each in kept)) == set().union(*(parts(each, 2) for each in some))
    assert len(kept) < len(some)


SAMPLE: Final = """
import pytest

@pytest.mark.thinned("left", "right", of=1)
@pytest.mark.parametrize("apart", ["a", "b"])
@pytest.mark.parametrize("left", [[1], [2], [3]])
@pytest.mark.parametrize("right", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_sample(apart, left, right): ...
"""


@pytest.fixture
def sample(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[pytest.Function]:
    """Collect the tests of a file."""
    path = tmp_path / f"sample_of_{request.function.__name__}.py"
    path.write_text(SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)  # pytest does so for good
    module = pytest.Module.from_parent(request.session, path=path)
    return [item for item in module.collect() if isinstance(item, pytest.Function)]


def test_each_value_is_kept_for_all_that_is_not_named(sample: list[pytest.Function]) -> None:
    """Of 12 tests that are not long anyway, three for each value of the parameter that is not named."""
    assert len(sample) == 18
    left = {item.name for item in left_out(sample)}
    kept = [item for item in sample if item.name not in left and item.get_closest_marker("long") is None]
    assert len(kept) == 6
    for each in "ab":
        params = [item.callspec.params for item in kept if item.callspec.params["apart"] == each]
        assert sorted(str(found["left"]) for found in params) == ["[1]", "[2]", "[3]"]
        assert {found["right"] for found in params} == {1, 3}


def test_a_parameter_that_is_not_there_is_an_error(sample: list[pytest.Function]) -> None:
    for item in sample:
        item.own_markers = [pytest.mark.thinned("middle").mark]
    with pytest.raises(pytest.UsageError, match="middle"):
        left_out(sample)
