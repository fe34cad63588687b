"""Defines the base of all responses: conversion to the JSON of OpenAI's API."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Wire", "finish_fields"]


class Wire(ABC):
    """Can be written in the wire form of OpenAI's API.

    Fields that OpenAI's API does not have are included as extensions: clients ignore them. The docstring of a
    response's ``to_dict`` says where its wire form differs from its fields.
    """

    __slots__ = ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the wire form in JSON-compatible types: dicts, lists, strings, numbers, bools and None."""

    def to_json(self) -> str:
        """Return the wire form as one line of JSON, in Unicode without escapes."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finish_fields(reason: str | None) -> dict[str, Any]:
    """Return the fields of a choice that say why it has ended.

    OpenAI's API has no "canceled", and clients check the value. Canceled output is "length" there, so that clients do
    not take it for complete; the extension ``canceled`` tells the two apart.
    """
    return {"finish_reason": "length", "canceled": True} if reason == "canceled" else {"finish_reason": reason}
