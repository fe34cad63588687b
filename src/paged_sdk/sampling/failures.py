"""Makes the errors of requests whose next token cannot be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from paged_sdk.errors import ConstraintError, NumericalError, PagedError
from paged_sdk.scheduler.request import Request

__all__ = ["NO_FAILURES", "Failures", "all_banned", "not_finite"]

Failures: TypeAlias = Mapping[int, PagedError]
"""Maps rows whose requests have to end to the errors to end them with."""

NO_FAILURES: Final[Failures] = MappingProxyType({})


def not_finite(request: Request) -> NumericalError:
    """Make the error of a request whose logits hold NaN or Inf."""
    return _numerical_error(request, "the logits hold NaN or Inf")


def all_banned(request: Request) -> PagedError:
    """Make the error of a request whose processors have banned every token."""
    if request.grammar is not None:
        return ConstraintError(
            f"request {request.request_id}: its other settings ban every token that the constraint allows, "
            "or the vocabulary has none",
            request_id=request.request_id,
            kind=request.options.constraint_kind,
        )
    return _numerical_error(request, "every token is banned")


def _numerical_error(request: Request, reason: str) -> NumericalError:
    return NumericalError(f"request {request.request_id}: {reason}", request_id=request.request_id)
