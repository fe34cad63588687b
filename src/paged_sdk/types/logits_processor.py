"""Define the interface of an application's own logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from paged_sdk.errors import InvalidRequestError

__all__ = [
    "AnyLogitsProcessor",
    "BatchLogitsProcessor",
    "LogitsProcessor",
    "check_logits_processors",
]


class LogitsProcessor(Protocol):
    """Changes the logits of a request's tokens before each is chosen.

    Processors run in the order in which a request names them: after bias, penalties and DRY, before temperature, top-k,
    top-p and min-p. They run on the engine's thread, so every request waits for them, and they must not wait for an
    answer of the same model.

    A processor's result must depend on its arguments alone. It is called for every choice of the request, again for the
    same tokens after a preemption, and with drafts also for tokens that may be taken back.

    An exception ends the request with :class:`~paged_sdk.errors.LogitsProcessorError`; other requests continue.
    """

    # Any, because this floor imports no torch, so that importing the package does not load it.
    def __call__(self, token_ids: Sequence[int], logits: Any, /) -> None:
        """Change the logits of the next token, in place.

        :param token_ids: the prompt's tokens and those generated so far
        :param logits: a ``torch.Tensor``, float32 ``[vocab_size]``, on the model's device; -inf bans a token
        """
        ...


@runtime_checkable
class BatchLogitsProcessor(Protocol):
    """Changes the logits of all requests that name the same object, in one call per step.

    It is a :class:`LogitsProcessor` for work that is cheaper in a batch, such as one matrix product for sixteen
    sequences. Rows of requests that have the object at the same place in their lists come together; the result for a
    row must depend on that row alone. If a call raises, its rows are passed again one at a time, and only the requests
    of rows that raise by themselves end.
    """

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Any, /) -> None:
        """Change the logits of the next tokens, in place.

        :param token_ids: for each row, the prompt's tokens and those generated so far
        :param logits: a ``torch.Tensor``, float32 ``[len(token_ids), vocab_size]``, on the model's device; -inf bans a
            token
        """
        ...


AnyLogitsProcessor: TypeAlias = LogitsProcessor | BatchLogitsProcessor


def check_logits_processors(processors: Sequence[Any]) -> None:
    """Check processors without calling them.

    :raises InvalidRequestError: one is not callable with two arguments, or is a coroutine function
    """
    for processor in processors:
        function = processor.process_batch if isinstance(processor, BatchLogitsProcessor) else processor
        call = getattr(function, "__call__", None)  # noqa: B004 (of an object with an async __call__)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        if not callable(function) or is_async or not _takes_two(function):
            allowed = "a function of (token_ids, logits), or an object with such a method process_batch, not async"
            raise InvalidRequestError.of("logits_processors", processor, allowed)


def _takes_two(processor: Any) -> bool:
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a C function may have no signature
        return True
    return True
