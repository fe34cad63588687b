"""Choose the few of many combinations of parameters that the suite runs; ``make test-long`` runs the others, too.

``@pytest.mark.thinned("heads", "dtype", "window")`` keeps so many tests of a function that every pair of values of
these parameters is among them, with ``of=1`` every value. It keeps them once for every combination of the parameters
that it does not name.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

__all__ = ["chosen", "left_out"]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the suite leaves to the long form.

    :raises pytest.UsageError: a marker names a parameter that its test does not have
    """
    numbers: defaultdict[Hashable, dict[int, int]] = defaultdict(dict)

    def number(function: Hashable, name: str, value: object) -> int:
        """Number a parameter's values as they come: not all can be hashed, but all tests share them."""
        known = numbers[function, name]
        return known.setdefault(id(value), len(known))

    groups: defaultdict[Hashable, list[tuple[pytest.Item, tuple[int, ...]]]] = defaultdict(list)
    strengths: dict[Hashable, int] = {}
    for item in items:
        marker = item.get_closest_marker("thinned")
        if marker is None or not isinstance(item, pytest.Function) or item.get_closest_marker("long"):
            continue
        function = (item.path, item.cls, item.originalname)
        values = {name: number(function, name, value) for name, value in item.callspec.params.items()}
        if unknown := set(marker.args) - set(values):
            raise pytest.UsageError(f"{item.nodeid} has no parameters {sorted(unknown)} to be thinned")
        named = tuple(values.pop(name) for name in marker.args)
        group = (*function, *values.items())
        groups[group].append((item, named))
        strengths[group] = marker.kwargs.get("of", 2)
    found = []
    for key, members in groups.items():
        kept = chosen([named for _, named in members], strengths[key])
        found += [item for place, (item, _) in enumerate(members) if place not in kept]
    return found


def chosen(combinations: Sequence[Sequence[int]], strength: int) -> set[int]:
    """Return the places of a few combinations which together have all that so many of the values of any have.

    Of those that add as many, the one is taken whose values were taken least often.
    """
    parts = [set(itertools.combinations(enumerate(values), strength)) for values in combinations]
    missing = set[tuple[tuple[int, int], ...]]().union(*parts)
    kept, taken = set[int](), Counter[tuple[int, int]]()

    def worth(place: int) -> tuple[int, int]:
        return len(parts[place] & missing), -sum(taken[value] for value in enumerate(combinations[place]))

    while missing:
        best = max(range(len(parts)), key=worth)
        kept.add(best)
        missing.difference_update(parts[best])
        taken.update(enumerate(combinations[best]))
    return kept
