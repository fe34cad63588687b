"""Collapses the small pages of memory that fills from its start into huge pages, once they are full.

Streaming through many megabytes in pages of 4 KiB costs TLB misses, and hardware prefetching stops at each page end: on
a Zen 4, two threads read keys and values at 34 GB/s from small pages and at 48 GB/s from pages of 2 MiB. Advising huge
pages before use would take 2 MiB of each tensor for the first token, 112 MiB for 28 layers. So small pages are
collapsed into a huge one when all of them are in use, which takes 0.5 to 5 ms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

from torch import Tensor

from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.own_pages import HUGE_PAGE

__all__ = ["HugePages"]

_SHARE: Final = 0.02
"""Share of elapsed time that collapsing may take. The first pages of SmolLM2's 60 tensors fill up at the same token:
when four of them were collapsed in each step, 12 to 15 steps of 8 ms took 2 to 21 ms longer."""

_MOST: Final = 0.006
"""Limit of the saved-up time budget in seconds, and so of the delay of a decode step: what a prefill chunk of 0.3 s
adds."""


class HugePages:
    """Collapses the pages of tensors that fill at the same rate.

    :param tensors: contiguous, with the same number of rows of the same size, filled from the first row on
    :param clock: returns seconds
    """

    def __init__(
        self, library: NativeLibrary, tensors: Sequence[Tensor], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._collapse = library.functions.paged_collapse_huge_page
        self._tensors = tensors
        self._clock = clock
        self._before = clock()
        self._saved = 0.0
        self._due: deque[int] = deque()
        self._band = 0
        self._rows_needed = self._rows_of(0)

    def follow(self, num_filled: int) -> None:
        """Collapse pages within the first ``num_filled`` rows, as many as the time budget allows, the others in later
        calls.
        """
        while num_filled >= self._rows_needed:
            self._due.extend(address for _, address in self._pages(self._band))
            self._band += 1
            self._rows_needed = self._rows_of(self._band)
        now = self._clock()
        self._saved = min(_MOST, self._saved + _SHARE * (now - self._before))
        while self._due and self._saved > 0:
            if not self._collapse(self._due.popleft()):  # the system cannot, or has no free huge page
                self._due.clear()
                self._rows_needed = inf
            begun, now = now, self._clock()
            self._saved -= now - begun
        self._before = now

    def _rows_of(self, band: int) -> float:
        """Return the number of rows that fills page ``band`` of every tensor; infinity if no tensor has that page."""
        rows = [
            -(-(address + HUGE_PAGE - tensor.data_ptr()) // tensor[0].nbytes) for tensor, address in self._pages(band)
        ]
        return max(rows, default=inf)

    def _pages(self, band: int) -> Iterator[tuple[Tensor, int]]:
        """Yield each tensor with the address of its huge page number ``band``; skip tensors without that page."""
        for tensor in self._tensors:
            address = (-(-tensor.data_ptr() // HUGE_PAGE) + band) * HUGE_PAGE
            if address + HUGE_PAGE <= tensor.data_ptr() + tensor.nbytes:
                yield tensor, address
