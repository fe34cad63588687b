"""The counter-based uniform numbers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_sampler import naive_uniform

from paged_sdk.kernels import sampling
from paged_sdk.sampling.uniform import stream_starts, uniforms


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**130), st.integers(0, 1000), st.integers(0, 10**6)), max_size=5))
def test_numbers_are_splitmix64s(arguments: list[tuple[int, int, int]]) -> None:
    """On the host, and on a device from where the stream starts."""
    seeds, choices, positions = [list(column) for column in zip(*arguments, strict=True)] or ([], [], [])
    expected = [naive_uniform(*each) for each in arguments]
    assert uniforms(seeds, choices, positions).tolist() == expected
    starts = torch.from_numpy(stream_starts(seeds, choices).view(np.int64))
    assert sampling.uniforms(starts, torch.tensor(positions, dtype=torch.int64)).tolist() == expected


def test_numbers_are_even_and_unrelated_along_every_argument() -> None:
    count = 20_000
    ramp, zeros = list(range(count)), [0] * count
    for arguments in ((ramp, zeros, zeros), (zeros, ramp, zeros), (zeros, zeros, ramp), (ramp, ramp, ramp)):
        numbers = uniforms(*arguments)
        assert 0 <= numbers.min() < 1e-3
        assert 1 - 1e-3 < numbers.max() < 1
        histogram, _ = np.histogram(numbers, bins=50, range=(0, 1))
        expected = count / 50
        assert ((histogram - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(98)
        for lag in (1, 2, 7):
            correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
            assert abs(correlation) < 5 / np.sqrt(count)
