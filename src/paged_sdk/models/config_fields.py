"""Read config.json; every value is checked, because it comes from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.errors import CheckpointError

__all__ = ["ConfigFields"]


class ConfigFields:
    """Gives typed access to one section of a model's config. ``null`` counts as absent.

    :param values: the section, as parsed from JSON
    :param name: where it stands in the file, for messages
    """

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        """Return whether the section has the key, even as ``null``."""
        return key in self._values

    def is_set(self, key: str) -> bool:
        """Return whether the key has a value other than ``null``, ``false`` and 0."""
        return bool(self._values.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number.

        :raises CheckpointError: it is absent and has no default, or is something else
        """
        value = self._required(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.error(key, "a whole number")

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1.

        :raises CheckpointError: as :meth:`integer`
        """
        value = self.integer(key, default)
        if value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1")

    def optional_positive(self, key: str) -> int | None:
        """Return a whole number of at least 1, or None.

        :raises CheckpointError: it is something else
        """
        return None if self._values.get(key) is None else self.positive(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number.

        :raises CheckpointError: it is absent and has no default, or is something else
        """
        value = self._required(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self.error(key, "a number")

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None.

        :raises CheckpointError: it is something else
        """
        return None if self._values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False.

        :raises CheckpointError: it is something else
        """
        value = self._required(key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        :raises CheckpointError: it is absent and has no default, or is something else
        """
        value = self._required(key, default)
        if isinstance(value, str):
            return value
        raise self.error(key, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent.

        :raises CheckpointError: it is something else
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise self.error(key, "a list of strings")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if absent.

        :raises CheckpointError: it is something else
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
            return tuple(float(each) for each in value)
        raise self.error(key, "a list of numbers")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty if absent.

        :raises CheckpointError: it is something else
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            return tuple(value)
        raise self.error(key, "a list of whole numbers")

    def section(self, key: str) -> ConfigFields:
        """Return a nested object; an empty one if absent.

        :raises CheckpointError: it is something else
        """
        value = self._required(key, {})
        if isinstance(value, dict):
            return ConfigFields(value, f"{self._name}{key}.")
        raise self.error(key, "an object")

    def values(self) -> dict[str, Any]:
        """Return a copy of the whole section."""
        return dict(self._values)

    def error(self, key: str, allowed: str) -> CheckpointError:
        """Return the error to raise for a value that cannot be used."""
        return CheckpointError(f"{self.shown(key)}: expected {allowed}")

    def shown(self, key: str) -> str:
        """Return a field and its value, for messages."""
        return f"config.json: {self._name}{key} = {self._values.get(key)!r}"

    def _required(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is not None:
            return default
        raise CheckpointError(f"config.json: {self._name}{key} is missing")
