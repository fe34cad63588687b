"""Keeps the processor states of one sequence between steps, for sampling on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.truncation import is_greedy
from paged_sdk.scheduler.request import Request

__all__ = ["TextState"]


class TextState:
    """Holds the states of the processors that a sequence needs, at one position of its output.

    :ivar request: the request that the sequence belongs to
    :ivar plain_from: the number of output tokens from which on an argmax of the raw logits is enough
    :param states: states of processors, each with the processor's index in the list
    """

    def __init__(self, request: Request, states: Sequence[tuple[int, ProcessorState[Any]]], plain_from: int) -> None:
        self.request = request
        self.plain_from = plain_from
        self._states = states
        self._output: list[int] = []

    @property
    def is_bare(self) -> bool:
        """Tell whether the sequence needs no processor."""
        return not self._states

    @classmethod
    def begin(cls, request: Request, processors: Sequence[Processor[Any]]) -> TextState:
        """Make the state of a sequence at the end of its prompt."""
        reaches = [processor.applies_until(request) for processor in processors]
        states = [
            (index, processor.begin(request))
            for index, (processor, reach) in enumerate(zip(processors, reaches, strict=True))
            if reach
        ]
        return cls(request, states, max(reaches, default=0) if _is_plain(request) else ALL_TOKENS)

    def fork(self) -> TextState:
        """Copy the state for another choice of the request."""
        forked = TextState(self.request, [(index, state.fork()) for index, state in self._states], self.plain_from)
        forked._output = self._output.copy()
        return forked

    def move_to(self, row: SampleRow) -> None:
        """Move to a row's position: roll back the tokens that differ from the row's output, then advance to its end."""
        if not self._states:
            return
        output, known = list(row.token_ids[row.num_prompt_tokens : row.num_tokens]), self._output
        num_common = len(known)
        if output[:num_common] != known:
            num_common = _num_common(output, known)
            for _, state in self._states:
                state.roll_back(len(known) - num_common)
            del known[num_common:]
        gained = output[num_common:]
        if gained:
            for _, state in self._states:
                state.advance(gained)
            known += gained

    def changes(self) -> Iterator[tuple[int, Any]]:
        """Yield the changes to the next token's logits, each with the index of its processor."""
        for index, state in self._states:
            change = state.change()
            if change is not None:
                yield index, change


def _is_plain(request: Request) -> bool:
    return is_greedy(request.sampling) and request.sampling.top_n_logprobs is None


def _num_common(output: Sequence[int], known: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(output, known, strict=False)
    return next((index for index, (new, old) in enumerate(pairs) if new != old), min(len(output), len(known)))
