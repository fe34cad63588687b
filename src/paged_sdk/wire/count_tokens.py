"""Holds requests that count a prompt's tokens, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from paged_sdk import RequestBuilder

__all__ = ["CountTokensCall"]


@frozen(kw_only=True)
class CountTokensCall:
    """Holds a parsed request.

    :ivar fields: the fields of the answer beside the count
    """

    model: str
    request: RequestBuilder
    fields: Mapping[str, Any] = field(factory=dict)

    def response(self, count: int) -> dict[str, Any]:
        """Return the answer: the number of tokens."""
        return {**self.fields, "input_tokens": count}
