"""Holds the sampling settings of one sequence, in the form in which draws read them."""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import field, frozen

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.native.structures_sampling import DRAW_SETTINGS
from paged_sdk.sampling.truncation import Settings, is_greedy
from paged_sdk.sampling.uniform import stream_starts

__all__ = ["SequenceSettings"]

_KEEPS_ALL: Final = 2**31 - 1


@frozen(eq=False)
class SequenceSettings:
    """Holds the sampling settings of one sequence; made once and kept while the sequence lives.

    :ivar params: the sampling parameters, with a seed unless greedy
    :ivar choice_index: index of the sequence among the choices of its request
    :ivar is_greedy: whether the likeliest token is taken
    :ivar record: the settings as bytes of :data:`~paged_sdk.kernels.native.structures_sampling.DRAW_SETTINGS`; a
        temperature of 0 if greedy
    """

    params: SamplingParams
    choice_index: int
    is_greedy: bool = field(init=False)
    record: bytes = field(init=False, repr=False)

    @is_greedy.default
    def _is_greedy(self) -> bool:
        return is_greedy(self.params)

    @record.default
    def _record(self) -> bytes:
        record = np.zeros(1, DRAW_SETTINGS)
        settings = Settings.of([self.params], vocab_size=_KEEPS_ALL)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            record[name] = getattr(settings, name)[0]
        if self.is_greedy:
            record["temperature"] = 0
        else:
            assert self.params.seed is not None, "the scheduler's sequences have a seed"
            record["stream"] = stream_starts([self.params.seed], [self.choice_index]).view(np.int64)
        return record.tobytes()
