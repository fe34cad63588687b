"""Keeps the state of one text between steps, for sampling on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.truncation import is_greedy
from paged_sdk.scheduler.request import Request

__all__ = ["TextState"]


class TextState:
    """Holds the states of the processors that a text needs, at one position of it.

    :param request: see :attr:`request`
    :param states: states of processors, each with the processor's index in the list
    :param plain_from: see :attr:`plain_from`
    :ivar request: the request that the text belongs to
    :ivar plain_from: the number of output tokens from which on the next token is the one with the largest logit, and
        nothing else is asked for
    """

    def __init__(self, request: Request, states: Sequence[tuple[int, ProcessorState[Any]]], plain_from: int) -> None:
        self.request = request
        self.plain_from = plain_from
        self._states = states
        self._output: list[int] = []

    @classmethod
    def begin(cls, request: Request, processors: Sequence[Processor[Any]]) -> TextState:
        """Make the state of a request's text at the end of the prompt."""
        reaches = [processor.applies_until(request) for processor in processors]
        states = [
            (place, processor.begin(request))
            for place, (processor, reach) in enumerate(zip(processors, reaches, strict=True))
            if reach
        ]
        return cls(request, states, max(reaches, default=0) if _is_plain(request) else ALL_TOKENS)

    def fork(self) -> TextState:
        """Make the state of another choice of the request, at the same position."""
        forked = TextState(self.request, [(place, state.fork()) for place, state in self._states], self.plain_from)
        forked._output = self._output.copy()
        return forked

    def move_to(self, row: SampleRow) -> None:
        """Move to the position of a row: forward, or back first where the output differs from the known one."""
        if not self._states:
            return
        output, known = list(row.token_ids[row.num_prompt_tokens :]), self._output
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
        """Compute the changes to the next token's logits, each with the index of its processor."""
        for place, state in self._states:
            change = state.change()
            if change is not None:
                yield place, change


def _is_plain(request: Request) -> bool:
    return is_greedy(request.sampling) and request.sampling.top_n_logprobs is None


def _num_common(output: Sequence[int], known: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = zip(output, known, strict=False)
    return next((place for place, (new, old) in enumerate(pairs) if new != old), min(len(output), len(known)))
