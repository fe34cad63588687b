"""Name the types of in-situ quantization (ISQ), which quantizes a checkpoint's weights while they are loaded."""

from __future__ import annotations

from enum import Enum

from paged_sdk.errors import ConfigError

__all__ = ["IsqFamily", "IsqType"]


class IsqFamily(Enum):
    """Says how weights that share a scale are grouped."""

    LEGACY = "legacy"
    """32 weights share a float16 scale, in some types a float16 minimum too."""

    K = "K"
    """256 weights share a float16 super-scale; each group of 16 or 32 has a scale that is a small multiple of it."""

    HQQ = "HQQ"
    """64 weights share a scale and a zero point, which is optimized to leave few large errors."""

    AFQ = "AFQ"
    """64 weights share a scale and a minimum, as in MLX's checkpoints."""

    LEVELS = "levels"
    """64 weights share a scale, and codes index unevenly spaced levels."""

    ROW = "row"
    """All weights of a row share a scale."""


class IsqType(Enum):
    """Names the types that weights can be quantized to; the number in a name is the bits per code.

    :ivar bits: bits per code
    :ivar family: how weights are grouped
    """

    Q2K = ("Q2K", 2, IsqFamily.K)
    Q3K = ("Q3K", 3, IsqFamily.K)
    Q4K = ("Q4K", 4, IsqFamily.K)
    Q5K = ("Q5K", 5, IsqFamily.K)
    Q6K = ("Q6K", 6, IsqFamily.K)
    Q4_0 = ("Q4_0", 4, IsqFamily.LEGACY)
    Q4_1 = ("Q4_1", 4, IsqFamily.LEGACY)
    Q5_0 = ("Q5_0", 5, IsqFamily.LEGACY)
    Q5_1 = ("Q5_1", 5, IsqFamily.LEGACY)
    Q8_0 = ("Q8_0", 8, IsqFamily.LEGACY)
    Q8_1 = ("Q8_1", 8, IsqFamily.LEGACY)
    """Stored as Q8_0: ggml's Q8_1 has the same codes and scales, and adds only block sums for use as activations."""
    HQQ4 = ("HQQ4", 4, IsqFamily.HQQ)
    HQQ8 = ("HQQ8", 8, IsqFamily.HQQ)
    AFQ2 = ("AFQ2", 2, IsqFamily.AFQ)
    AFQ3 = ("AFQ3", 3, IsqFamily.AFQ)
    AFQ4 = ("AFQ4", 4, IsqFamily.AFQ)
    AFQ6 = ("AFQ6", 6, IsqFamily.AFQ)
    AFQ8 = ("AFQ8", 8, IsqFamily.AFQ)
    FP8 = ("FP8", 8, IsqFamily.ROW)
    INT8 = ("INT8", 8, IsqFamily.ROW)
    NF4 = ("NF4", 4, IsqFamily.LEVELS)
    FP4 = ("FP4", 4, IsqFamily.LEVELS)

    bits: int
    family: IsqFamily

    def __new__(cls, value: str, bits: int, family: IsqFamily) -> IsqType:
        member = object.__new__(cls)
        member._value_ = value
        member.bits = bits
        member.family = family
        return member

    @classmethod
    def parse(cls, text: str, *, setting: str = "isq") -> IsqType:
        """Read a type by its name in any case ("Q4K", "q4_k", "q8_0"), or by a bare number of bits. "Q8K", ggml's type
        for activations, is read as Q8_0.

        :raises ConfigError: naming ``setting`` and the known types
        """
        name = text.strip().upper() if isinstance(text, str) else ""
        best = {str(member.bits): member for member in (cls.Q2K, cls.Q3K, cls.Q4K, cls.Q5K, cls.Q6K, cls.Q8_0)}
        named = {member.value: member for member in cls} | {"Q8K": cls.Q8_0, "Q8_K": cls.Q8_0}
        named |= {f"Q{member.bits}_K": member for member in cls if member.family is IsqFamily.K}
        found = best.get(name) or named.get(name)
        if found is None:
            names = ", ".join(member.value for member in cls)
            raise ConfigError.of(setting, text, f"one of {names}, or a number of bits: {', '.join(best)}")
        return found
