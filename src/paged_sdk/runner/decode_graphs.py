"""Records decode steps once and replays them: one launch replaces some hundreds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import DecodeBackend
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.lora_slots import AdapterSlots, SlotRows
from paged_sdk.kernels.step import StepContext
from paged_sdk.kernels.triton.availability import launch_errors
from paged_sdk.models.causal_model import CausalModel

__all__ = ["DecodeGraphs", "Record", "batch_sizes", "context_bounds"]

Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function, and returns another that replays it: the same operations on the same memory."""

# A recorded step is launched for the longest context that it may meet. Attention cuts longer ones than this into parts
# even where rows alone keep a device busy, and most steps would launch those parts for nothing.
_USUAL_CONTEXT: Final = 8192

# So many recordings may fail: smaller steps take less memory, but what fails thrice is not the size.
_MOST_ERRORS: Final = 3

# Of the largest value: cuBLAS may add up in another order while it is recorded. Other memory gives other values.
_MOST_DIFFERENCE: Final = 0.05

# Up to each bound, sizes grow by so many rows: beyond 16 rows a step is padded by a quarter at most.
_STEPS: Final = ((4, 1), (16, 4), (64, 8), (256, 16), (1 << 30, 32))


def batch_sizes(largest: int) -> list[int]:
    """Return the numbers of rows to record steps for, ascending: a step is padded to the next."""
    sizes: list[int] = []
    for bound, step in _STEPS:
        first = sizes[-1] + step if sizes else step
        sizes += range(first, min(bound, largest) + 1, step)
    return sizes if sizes and sizes[-1] == largest else [*sizes, largest]


def context_bounds(max_model_len: int) -> list[int]:
    """Return the context lengths to record steps for, ascending."""
    return [max_model_len] if max_model_len <= _USUAL_CONTEXT else [_USUAL_CONTEXT, max_model_len]


class DecodeGraphs:
    """Runs recorded decode steps of any number of rows and any context, up to the largest that was recorded.

    One copy sends a step's input to the device. Tokens that the previous step sampled are read from where that step
    left them on the device.

    :param overlap: int64: the tokens that the previous step sampled
    :param sizes: numbers of rows to record steps for
    :param bounds: context lengths to record each size for
    :param slots: where steps find the adapters of their rows; None: no row has one
    :param record: records a step; it may call the step's function any number of times
    :ivar errors: of recordings that failed; larger steps, or those over longer contexts, take the place of theirs
    :ivar largest: how many rows the largest step has
    :raises Exception: the first of these errors: no step that serves every context could be recorded
    :ivar hidden: ``[largest, hidden_size]``: the tensor that steps write their results to
    """

    def __init__(
        self,
        model: CausalModel,
        backend: DecodeBackend,
        overlap: Tensor,
        *,
        sizes: Iterable[int],
        bounds: Iterable[int],
        record: Record,
        slots: AdapterSlots | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._backend = backend
        self._device = overlap.device
        self._sizes = np.array(sorted(sizes))
        self._bounds = sorted(bounds)
        self.errors: list[Exception] = []
        made: dict[tuple[int, int], _Graph] = {}
        hidden: Tensor | None = None
        # The largest goes first: the others fit into its memory.
        wanted = list(itertools.product(self._sizes[::-1].tolist(), self._bounds[::-1]))
        for done, (size, bound) in enumerate(wanted, 1):
            input_ = self._empty_input(size).to(self._device)
            step = _RecordedStep(model, backend, overlap, input_, bound, hidden, slots)
            try:
                replay = record(step.run)
            except launch_errors() as error:
                clear_frames(error)
                self.errors.append(error)
                if len(self.errors) == _MOST_ERRORS:
                    break
                continue
            assert step.hidden is not None, "nothing was run while recording"
            hidden = step.hidden if hidden is None else hidden
            made[size, bound] = _Graph(step.input, step.hidden, replay, step.run)
            if on_progress is not None:
                on_progress(done, len(wanted))
        whole = [size for size, bound in made if bound == self._bounds[-1]]
        if hidden is None or not whole:
            raise self.errors[0]
        self.hidden = hidden
        self.largest: int = max(whole)
        self._sizes = self._sizes[self._sizes <= self.largest]
        # Where a recording has failed, the next larger step serves, which has the longest bound at the latest.
        self._graphs = {
            (size, bound): next(
                made[one, other]
                for one, other in itertools.product(self._sizes.tolist(), self._bounds)
                if one >= size and other >= bound and (one, other) in made
            )
            for size, bound in itertools.product(self._sizes.tolist(), self._bounds)
        }

    def check(self) -> None:
        """Replay every recorded step once, of padding alone, and compare one of a single row with what it is when it is
        launched. To be called before there are sequences: the row writes to the first block.

        :raises RuntimeError: the device refuses a replay, or the two results differ
        """
        for graph in self._graphs.values():
            graph.replay()
        seat = self._backend.seats([-1], [0], [[0]])  # of a sequence that there never is
        graph = self._graphs[int(self._sizes[0]), self._bounds[0]]
        padding = graph.input.clone()
        graph.input[:2, 0] = torch.tensor([int(seat[0]), 0], device=self._device)
        graph.replay()
        replayed = graph.hidden.clone()
        graph.launch()
        launched = graph.hidden
        graph.input.copy_(padding)
        most = _MOST_DIFFERENCE * float(launched.abs().max())
        if not torch.allclose(replayed, launched, rtol=0.0, atol=most, equal_nan=True):
            raise RuntimeError("a replayed step has another result than a launched one")

    def forward(
        self,
        seq_ids: Sequence[int],
        versions: Sequence[int],
        tables: Sequence[Sequence[int]],
        positions: Sequence[int],
        token_ids: Sequence[int] | None,
        sources: Sequence[int],
        places: Sequence[int],
    ) -> Tensor:
        """Run a step of one token per row.

        :param seq_ids: the sequences of the rows, at most :attr:`largest`
        :param versions: versions of their block tables: see :attr:`~paged_sdk.types.step.StepRow.kv_version`
        :param tables: their block tables
        :param positions: positions of the tokens, below the largest bound
        :param token_ids: the tokens, where the host knows them; None: it knows none
        :param sources: index of each token among those that the previous step sampled; -1: the host knows it
        :param places: of the rows' adapters in the slots; -1: a row has none
        :returns: ``[num_rows, hidden_size]``, valid until the next call
        """
        num_rows, longest = len(tables), max(positions) + 1
        size = int(self._sizes[np.searchsorted(self._sizes, num_rows)])
        graph = self._graphs[size, next(bound for bound in self._bounds if bound >= longest)]
        host = self._empty_input(graph.input.shape[1])
        columns = host.numpy()
        columns[0, :num_rows] = self._backend.seats(seq_ids, versions, tables)
        for column, values in zip(columns[1:], (positions, token_ids, sources, places), strict=True):
            if values is not None:
                column[:num_rows] = values
        graph.input.copy_(host, non_blocking=True)
        graph.replay()
        return graph.hidden[:num_rows]

    def _empty_input(self, size: int) -> Tensor:
        """Make input of padding rows only: seats, positions, tokens, sources, places of adapters."""
        host = torch.empty(5, size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for column, value in zip(host.numpy(), (self._backend.empty_seat, -1, 0, -1, -1), strict=True):
            column.fill(value)
        return host


@frozen(eq=False)
class _Graph:
    """Holds a recorded step: the tensors that it reads and writes, the function that runs it, and the one that was
    recorded.
    """

    input: Tensor
    hidden: Tensor
    replay: Callable[[], None]
    launch: Callable[[], None]


class _RecordedStep:
    """Runs a step of a fixed number of rows, over contexts up to a bound, so that it can be recorded.

    :ivar input: ``[5, size]`` int64: seats, positions, tokens, sources, places of adapters
    :ivar hidden: ``[size, hidden_size]``: the result; None before the first run
    """

    def __init__(
        self,
        model: CausalModel,
        backend: DecodeBackend,
        overlap: Tensor,
        input_: Tensor,
        bound: int,
        largest_hidden: Tensor | None,
        slots: AdapterSlots | None,
    ) -> None:
        self.input = input_
        self.hidden = None if largest_hidden is None else largest_hidden[: input_.shape[1]]
        self._bound = bound
        self._model = model
        self._backend = backend
        self._overlap = overlap
        self._slots = slots

    def run(self) -> None:
        """Run the step by operations on the device alone, whose shapes do not depend on values of the input."""
        seats, positions, token_ids, sources, places = self.input.unbind()
        overlap = self._overlap.index_select(0, sources.clamp(min=0))
        slots = None if self._slots is None else SlotRows(self._slots, places)
        context = StepContext(attention=self._backend.decode(seats, positions, self._bound), slots=slots)
        token_ids = token_ids.where(sources < 0, overlap)
        hidden = self._model.forward(token_ids, positions.clamp(min=0), context)
        if self.hidden is None:
            self.hidden = torch.empty_like(hidden)
        self.hidden.copy_(hidden)
