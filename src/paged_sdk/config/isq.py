"""In-situ quantization (ISQ): quantizing a checkpoint's weights while they are loaded."""

from __future__ import annotations

from enum import Enum

from paged_sdk.errors import ConfigError

__all__ = ["IsqType"]


class IsqType(Enum):
    """Names the block formats that weights can be quantized to; the number is the bits of a weight's code."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q4K = "Q4K"
    Q5K = "Q5K"
    Q6K = "Q6K"

    @classmethod
    def parse(cls, text: str, *, setting: str = "isq") -> IsqType:
        """Return a type by its name in any case ("Q4K", "q4_k", "q8_0"), or from a bare number of bits.

        :raises ConfigError: naming ``setting`` and the types there are
        """
        name = text.strip().upper()
        by_bits = {"4": cls.Q4K, "5": cls.Q5K, "6": cls.Q6K, "8": cls.Q8_0}
        found = by_bits.get(name) or next((each for each in cls if name in (each.value, each.gguf_name)), None)
        if found is None:
            names = ", ".join(each.value for each in cls)
            raise ConfigError.of(setting, text, f"one of {names}, or a number of bits: {', '.join(by_bits)}")
        return found

    @property
    def gguf_name(self) -> str:
        """Return the format's name in GGUF files."""
        return self.value if "_" in self.value else f"{self.value[:-1]}_K"

    @property
    def for_narrow_rows(self) -> IsqType:
        """Return the format for rows that are no multiple of 256, which the K formats need: one step wider."""
        return {IsqType.Q4K: IsqType.Q5_0, IsqType.Q5K: IsqType.Q5_1, IsqType.Q6K: IsqType.Q8_0}.get(self, self)

    @property
    def for_head(self) -> IsqType:
        """Return the format of the output projection, whose errors reach the logits undamped."""
        return IsqType.Q6K if self in (IsqType.Q4_0, IsqType.Q4_1, IsqType.Q4K) else IsqType.Q8_0
