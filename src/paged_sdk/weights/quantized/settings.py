"""Read the settings of quantized weights from config.json, with checks, since the file is untrusted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError, shown

__all__ = ["FormatSettings"]


class FormatSettings:
    """Gives typed access to the section of config.json that describes a format. ``null`` counts as absent.

    :ivar path: the checkpoint's directory
    :param values: the section, as parsed from JSON
    :param name: the section's path within the file, for messages
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
        """Return whether any of these keys has a value other than a neutral one, such as false or "dense"."""
        return any(self._values.get(key) not in (None, False, {}, "", "dense") for key in keys)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a 32-bit integer.

        :raises CheckpointError: the value is absent without a default, or is not such an integer
        """
        value = self._found(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31:
            return value
        raise self.error(key, "a whole number")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        :raises CheckpointError: the value is absent without a default, or is not a string
        """
        value = self._found(key, default)
        if isinstance(value, str):
            return value
        raise self.error(key, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool.

        :raises CheckpointError: the value is not a bool
        """
        value = self._found(key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, "true or false")

    def one_of(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return a string that must be among the supported ones.

        :raises UnsupportedQuantizationError: another string is given
        """
        value = self.text(key, default)
        if value in allowed:
            return value
        raise self.unsupported(key, allowed)

    def bits(self, key: str, allowed: Collection[int]) -> int:
        """Return an integer that must be among the supported ones.

        :raises UnsupportedQuantizationError: another integer is given
        """
        value = self.integer(key)
        if value in allowed:
            return value
        raise self.unsupported(key, [str(each) for each in allowed])

    def positive(self, key: str) -> int:
        """Return an integer of at least 1.

        :raises CheckpointError: the value is absent, or is not such an integer
        """
        value = self.integer(key)
        if value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1")

    def block(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of a block: rows and columns.

        :raises CheckpointError: the value is not two integers of at least 1
        """
        match self._found(key, list(default)):
            case [int(rows), int(cols)] if 1 <= rows < 2**31 and 1 <= cols < 2**31:
                return int(rows), int(cols)
        raise self.error(key, "two whole numbers of at least 1")

    def group_size(self, key: str, default: int | None = None) -> int:
        """Return the number of columns in a group, or -1 if a row is one group.

        :raises CheckpointError: the value is absent without a default, or is not such an integer
        """
        value = self.integer(key, default)
        if value == -1 or value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1, or -1")

    def section(self, key: str) -> FormatSettings:
        """Return a nested object; an empty one if absent.

        :raises CheckpointError: the value is not an object
        """
        value = self._found(key, {})
        if isinstance(value, dict):
            return FormatSettings(value, f"{self._name}.{key}", self.path)
        raise self.error(key, "an object")

    def sections(self) -> dict[str, FormatSettings]:
        """Return every nested object by its key."""
        return {key: self.section(key) for key, value in self._values.items() if isinstance(value, dict)}

    def error(self, key: str, expected: str) -> CheckpointError:
        """Return the error to raise for an invalid value."""
        return CheckpointError(f"{self._shown(key)}: expected {expected}", path=self.path)

    def unsupported(self, key: str, supported: Collection[str]) -> UnsupportedQuantizationError:
        """Return the error to raise for a valid value that is not supported."""
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
