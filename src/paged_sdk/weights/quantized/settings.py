"""Read what config.json says of quantized weights; every value is checked, because it comes from outside."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError, shown

__all__ = ["FormatSettings"]


class FormatSettings:
    """Gives typed access to a section of config.json that describes a format. ``null`` counts as absent.

    :ivar path: the checkpoint
    :param values: the section, as parsed from JSON
    :param name: where it stands in the file, for messages
    """

    def __init__(self, values: Mapping[str, Any], name: str, path: Path) -> None:
        self.path = path
        self._values = values
        self._name = name

    @property
    def method(self) -> str:
        """Return the format's name for itself; empty if it has none."""
        found = self._values.get("quant_method")
        return found if isinstance(found, str) else ""

    def __contains__(self, key: str) -> bool:
        """Return whether the section has the key, even as ``null``."""
        return key in self._values

    def is_set(self, *keys: str) -> bool:
        """Return whether any of these keys has a value that says something."""
        return any(self._values.get(key) not in (None, False, {}, "", "dense") for key in keys)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 32 bits.

        :raises CheckpointError: it is absent and has no default, or is something else
        """
        value = self._found(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31:
            return value
        raise self.error(key, "a whole number")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        :raises CheckpointError: it is absent and has no default, or is something else
        """
        value = self._found(key, default)
        if isinstance(value, str):
            return value
        raise self.error(key, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False.

        :raises CheckpointError: it is something else
        """
        value = self._found(key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, "true or false")

    def one_of(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return a string that is one of those that are supported.

        :raises UnsupportedQuantizationError: it is another
        """
        value = self.text(key, default)
        if value in allowed:
            return value
        raise self.unsupported(key, allowed)

    def bits(self, key: str, allowed: Collection[int]) -> int:
        """Return a whole number that is one of those that are supported.

        :raises UnsupportedQuantizationError: it is another
        """
        value = self.integer(key)
        if value in allowed:
            return value
        raise self.unsupported(key, [str(each) for each in allowed])

    def positive(self, key: str) -> int:
        """Return a whole number of at least 1.

        :raises CheckpointError: it is absent, or something else
        """
        value = self.integer(key)
        if value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1")

    def block(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """Return numbers of rows and of columns.

        :raises CheckpointError: it is something else
        """
        match self._found(key, list(default)):
            case [int(rows), int(cols)] if 1 <= rows < 2**31 and 1 <= cols < 2**31:
                return int(rows), int(cols)
        raise self.error(key, "two whole numbers of at least 1")

    def group_size(self, key: str, default: int | None = None) -> int:
        """Return a number of columns, or -1 for a whole row.

        :raises CheckpointError: it is something else
        """
        value = self.integer(key, default)
        if value == -1 or value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1, or -1")

    def section(self, key: str) -> FormatSettings:
        """Return a nested object; an empty one if absent.

        :raises CheckpointError: it is something else
        """
        value = self._found(key, {})
        if isinstance(value, dict):
            return FormatSettings(value, f"{self._name}.{key}", self.path)
        raise self.error(key, "an object")

    def sections(self) -> dict[str, FormatSettings]:
        """Return every nested object by its key."""
        return {key: self.section(key) for key, value in self._values.items() if isinstance(value, dict)}

    def error(self, key: str, expected: str) -> CheckpointError:
        """Return the error to raise for a value that cannot be used."""
        return CheckpointError(f"{self._shown(key)}: expected {expected}", path=self.path)

    def unsupported(self, key: str, supported: Collection[str]) -> UnsupportedQuantizationError:
        """Return the error to raise for a value that has a meaning, but none here."""
        return UnsupportedQuantizationError(
            f"{self._shown(key)}: supported are {', '.join(supported)}",
            path=self.path,
            quantization=self.method,
            supported=tuple(supported),
        )

    def _shown(self, key: str) -> str:
        return f"{self.path / 'config.json'}: {self._name}.{shown(key)[1:-1]} = {shown(self._values.get(key))}"

    def _found(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is not None:
            return default
        raise CheckpointError(f"{self.path / 'config.json'}: {self._name}.{key} is missing", path=self.path)
