"""Computes uniform random numbers from seed, choice and position, without state (a counter-based generator)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["more_uniforms", "stream_starts", "streams_of_others", "uniforms"]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_64_BIT_PRIME: Final = 2**64 - 59


def uniforms(seeds: Sequence[int], choice_indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, one per (seed, choice, position).

    There is no state: a number is the same in every batch, and again after preemption. The position is the counter of a
    SplitMix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as in
    :func:`paged_sdk.kernels.sampling.uniforms`, which gives the same numbers on a device.

    :param seeds: any ints >= 0
    :param choice_indices: index of the sequence among the choices of its request
    :param positions: number of output tokens before the one to choose
    :returns: ``[len(seeds)]``
    """
    return _fractions(_bits(seeds, choice_indices, positions))


def more_uniforms(
    seeds: Sequence[int], choice_indices: Sequence[int], positions: Sequence[int], num: int
) -> npt.NDArray[np.float64]:
    """Return several independent numbers for each (seed, choice, position).

    :param num: how many. The first is the number of :func:`uniforms`; its bits seed a SplitMix64 stream of the others
    :returns: ``[len(seeds), num]``
    """
    first = _bits(seeds, choice_indices, positions)[:, None]
    others = _mix(first + _GAMMA * np.arange(1, num, dtype=np.uint64))
    return _fractions(np.concatenate([first, others], axis=1))


def streams_of_others(streams: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the stream in which number j of :func:`more_uniforms`, j at least 1, is at position j - 1.

    :param streams: the starts of the streams of the first numbers
    :param positions: the places of the first numbers in them
    """
    return _mix(streams.view(np.uint64) + _GAMMA * (positions.view(np.uint64) + np.uint64(1))).view(np.int64)


def stream_starts(seeds: Sequence[int], choice_indices: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the start of the stream of each (seed, choice), hashed from both by SplitMix64's own mixer.

    :param seeds: any ints >= 0
    :param choice_indices: index of the sequence among the choices of its request
    :returns: ``[len(seeds)]``
    """
    start = _mix(np.array([seed % _LARGEST_64_BIT_PRIME for seed in seeds], np.uint64) + _GAMMA)
    return _mix(start + _GAMMA * (np.array(choice_indices, np.uint64) + np.uint64(1)))


def _bits(seeds: Sequence[int], choice_indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    start = stream_starts(seeds, choice_indices)
    return _mix(start + _GAMMA * (np.array(positions, np.uint64) + np.uint64(1)))


def _fractions(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: every input bit flips every output bit with probability near one half."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
