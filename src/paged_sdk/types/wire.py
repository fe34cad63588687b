"""Defines what every response has in common: a form that goes over a wire."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Wire", "finish_fields"]


class Wire(ABC):
    """Can be written in the form that OpenAI's API has on the wire.

    Fields that OpenAI's API does not know stay in as extensions: clients ignore them. The class of a response says
    where its wire form says something else than its fields.
    """

    __slots__ = ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the wire form as dicts, lists, strings, numbers, bools and None alone, which JSON can hold."""

    def to_json(self) -> str:
        """Return the wire form as one line of JSON, in Unicode without escapes."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finish_fields(reason: str | None) -> dict[str, Any]:
    """Return the fields of a choice that say why it has ended.

    OpenAI's API has no "canceled", and clients check the value. A text that was cut off is "length" there, so that
    nobody takes it for whole; the extension ``canceled`` says how it was.
    """
    return {"finish_reason": "length", "canceled": True} if reason == "canceled" else {"finish_reason": reason}
