"""Calls the functions by which an application changes a request's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from attrs import frozen
from torch import Tensor

from paged_sdk.errors import LogitsProcessorError
from paged_sdk.sampling.failures import Failures
from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.scheduler.request import Request
from paged_sdk.types.logits_processor import LogitsProcessor

__all__ = ["CustomChange", "CustomProcessors", "CustomState"]


@frozen(eq=False)
class CustomChange:
    """Holds a request's processors and the tokens to call them with.

    :ivar token_ids: the tokens of the text so far, which processors cannot change
    """

    request: Request
    token_ids: tuple[int, ...]


class CustomProcessors(Processor[CustomChange]):
    """Calls a request's ``logits_processors``, one after the other. A request whose processors fail ends alone."""

    def applies_until(self, request: Request) -> int:
        return ALL_TOKENS if request.options.logits_processors else 0

    def begin(self, request: Request) -> CustomState:
        return CustomState(request, list(request.prompt_token_ids))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, CustomChange]]) -> Failures:
        failures: dict[int, LogitsProcessorError] = {}
        for row, change in changes:
            for processor in change.request.options.logits_processors:
                error = _call(processor, change, logits[row])
                if error is not None:
                    failures[row] = error
                    break
        return failures


class CustomState(ProcessorState[CustomChange]):
    """Keeps the tokens of one text.

    :param tokens: the tokens so far
    """

    def __init__(self, request: Request, tokens: list[int]) -> None:
        self._request = request
        self._tokens = tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def roll_back(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]

    def fork(self) -> Self:
        return type(self)(self._request, self._tokens.copy())

    def change(self) -> CustomChange:
        return CustomChange(self._request, tuple(self._tokens))


def _call(processor: LogitsProcessor, change: CustomChange, logits: Tensor) -> LogitsProcessorError | None:
    """Let a processor change one row; return the error that the request ends with if the result cannot be used."""
    try:
        # A caller without a type checker may have written one that returns the logits.
        returned: object = processor(change.token_ids, logits)  # type: ignore[func-returns-value]
    except BaseException as error:  # SystemExit too: on the engine's thread, it would end nothing but the engine
        failure = _failure(processor, change, f"raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    if returned is not None:
        return _failure(processor, change, f"returned {type(returned).__name__}: it has to change the logits in place")
    largest = float(logits.max())  # the maximum is NaN if any value is
    if largest == float("inf") or largest != largest:
        return _failure(processor, change, "left NaN or Inf in the logits")
    return None


def _failure(processor: LogitsProcessor, change: CustomChange, reason: str) -> LogitsProcessorError:
    request_id = change.request.request_id
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    return LogitsProcessorError(f"request {request_id}: logits processor {name} {reason}", request_id=request_id)
