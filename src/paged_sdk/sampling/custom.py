"""Calls the logits processors that an application attaches to a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

from attrs import frozen
from torch import Tensor

from paged_sdk.errors import LogitsProcessorError
from paged_sdk.sampling.failures import Failures
from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.scheduler.request import Request
from paged_sdk.types.logits_processor import AnyLogitsProcessor, BatchLogitsProcessor, LogitsProcessor

__all__ = ["CustomChange", "CustomProcessors", "CustomState"]

_Errors: TypeAlias = dict[int, LogitsProcessorError]


@frozen(eq=False)
class CustomChange:
    """Holds a request's processors and the tokens to call them with.

    :ivar token_ids: prompt and output so far; a tuple, so that processors cannot change it
    """

    request: Request
    token_ids: tuple[int, ...]


class CustomProcessors(Processor[CustomChange]):
    """Calls the ``logits_processors`` of each request in order. If one fails, only its request ends."""

    def applies_until(self, request: Request) -> int:
        return ALL_TOKENS if request.options.logits_processors else 0

    def begin(self, request: Request) -> CustomState:
        return CustomState(request, list(request.prompt_token_ids))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, CustomChange]]) -> Failures:
        failures: _Errors = {}
        for index in range(max(len(change.request.options.logits_processors) for _, change in changes)):
            # Keyed by identity: different processors may compare equal, or be unhashable.
            users: defaultdict[int, dict[int, CustomChange]] = defaultdict(dict)
            for row, change in changes:
                processors = change.request.options.logits_processors
                if index < len(processors) and row not in failures:
                    users[id(processors[index])][row] = change
            for rows in users.values():
                processor = next(iter(rows.values())).request.options.logits_processors[index]
                if isinstance(processor, BatchLogitsProcessor):
                    failures |= _change_together(processor, logits, rows)
                else:
                    failures |= _change_each(processor, logits, rows)
        return failures


class CustomState(ProcessorState[CustomChange]):
    """Keeps the tokens of one sequence.

    :param tokens: prompt and output so far
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


@frozen
class _Fault:
    """Says why the result of a processor cannot be used.

    :ivar cause: the exception that the processor raised, if any
    """

    reason: str
    cause: BaseException | None = None

    def error(self, processor: AnyLogitsProcessor, request: Request) -> LogitsProcessorError:
        """Make the error that ends a request."""
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        message = f"request {request.request_id}: logits processor {name} {self.reason}"
        error = LogitsProcessorError(message, request_id=request.request_id)
        error.__cause__ = self.cause
        return error


_NOT_FINITE: Final = _Fault("left NaN or Inf in the logits")


def _change_each(processor: LogitsProcessor, logits: Tensor, rows: Mapping[int, CustomChange]) -> _Errors:
    """Apply a processor to rows one at a time; return the errors of rows whose result cannot be used."""
    errors: _Errors = {}
    for row, change in rows.items():
        fault = _call(processor, change.token_ids, logits[row])
        if fault is None and _are_bad(logits[row : row + 1])[0]:
            fault = _NOT_FINITE
        if fault is not None:
            errors[row] = fault.error(processor, change.request)
    return errors


def _change_together(processor: BatchLogitsProcessor, logits: Tensor, rows: Mapping[int, CustomChange]) -> _Errors:
    """Apply a processor to all rows in one call, or one at a time if that call fails; see :func:`_change_each`."""
    indices = list(rows)
    changed = logits[indices]  # a copy
    fault = _call(processor.process_batch, [change.token_ids for change in rows.values()], changed)
    if fault is not None and len(rows) > 1:
        errors: _Errors = {}
        for row, change in rows.items():
            errors |= _change_together(processor, logits, {row: change})
        return errors
    if fault is not None:
        return {row: fault.error(processor, change.request) for row, change in rows.items()}
    logits[indices] = changed
    bad = zip(rows.items(), _are_bad(changed), strict=True)
    return {row: _NOT_FINITE.error(processor, change.request) for (row, change), is_bad in bad if is_bad}


def _call(process: Callable[[Any, Tensor], object], token_ids: Sequence[Any], logits: Tensor) -> _Fault | None:
    """Call a processor; return its fault, or None."""
    try:
        # An untyped application may pass a processor that returns the logits instead of changing them.
        returned = process(token_ids, logits)
    except BaseException as error:  # SystemExit too: on the engine's thread it would end only the engine
        return _Fault(f"raised {type(error).__name__}: {error}", error)
    if returned is not None:
        return _Fault(f"returned {type(returned).__name__}: it has to change the logits in place")
    return None


def _are_bad(logits: Tensor) -> list[bool]:
    """Return for each row whether it holds NaN or Inf."""
    largest = logits.amax(-1)  # the maximum is NaN if any value is
    return ((largest == float("inf")) | largest.isnan()).tolist()
