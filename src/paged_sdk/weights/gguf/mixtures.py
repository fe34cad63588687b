"""Choose the type of each tensor of a GGUF file, by the named mixtures of llama.cpp's quantize tool, such as Q4_K_M.

A mixture gives more bits to the matrices that are most sensitive to quantization: the output projection, and the value
and MLP down projections of the first and last eighths of the layers and of every third layer between. Projections that
are fused with values count as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import frozen

from paged_sdk.errors import ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, tensor_type_of
from paged_sdk.kernels.quantized.quantize import QUANTIZED_TYPES
from paged_sdk.kernels.quantized.quantize_tables import TABLE_TYPES

__all__ = [
    "MIXTURES",
    "PLAIN_TYPES",
    "ModelShape",
    "file_type",
    "fitting_type",
    "is_quantizable",
    "tensor_types",
    "writable_types",
]

# llama.cpp's id of each mixture (``general.file_type``), and the type of matrices without a special rule.
_MIXTURES: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "F32": (0, "F32"),
        "F16": (1, "F16"),
        "BF16": (32, "BF16"),
        "Q4_0": (2, "Q4_0"),
        "Q4_1": (3, "Q4_1"),
        "Q5_0": (8, "Q5_0"),
        "Q5_1": (9, "Q5_1"),
        "Q8_0": (7, "Q8_0"),
        "Q2_K": (10, "Q2_K"),
        "Q3_K_S": (11, "Q3_K"),
        "Q3_K_M": (12, "Q3_K"),
        "Q3_K_L": (13, "Q3_K"),
        "Q4_K_S": (14, "Q4_K"),
        "Q4_K_M": (15, "Q4_K"),
        "Q5_K_S": (16, "Q5_K"),
        "Q5_K_M": (17, "Q5_K"),
        "Q6_K": (18, "Q6_K"),
        "IQ4_NL": (25, "IQ4_NL"),
        "IQ4_XS": (30, "IQ4_XS"),
        "TQ1_0": (36, "TQ1_0"),
        "TQ2_0": (37, "TQ2_0"),
        "MXFP4_MOE": (38, "MXFP4"),
    }
)
MIXTURES: Final = tuple(_MIXTURES)
"""The names of all mixtures."""

PLAIN_TYPES: Final = ("F32", "F16", "BF16")
"""The types that are not quantized."""
# Replacements if a row's length is no multiple of the 256-element block; llama.cpp takes IQ4_NL, as small as Q4_0.
_NARROW: Final = MappingProxyType(
    {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    | {"IQ4_XS": "IQ4_NL", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}
)
_CODEBOOKS: Final = re.compile(r"IQ[123]_[A-Z]+")  # types and mixtures of less than 4 bits
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_VALUES: Final = re.compile(r"^blk\.\d+\.(?:attn_v|attn_qkv)\.weight$")
_TERNARY: Final = ("TQ1_0", "TQ2_0")
_OF_FEW_BITS: Final = ("Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS")
# Not quantized: norms, routers of experts, rotary factors, convolutions; and encoders' position and type embeddings and
# classifiers.
_EXACT: Final = re.compile(
    r"_norm\.|ffn_gate_inp|^rope_|\.shortconv\.conv\.|\.ssm_conv1d\.|^position_embd\.|^token_types\.|^cls\.output\."
)


@frozen(kw_only=True)
class ModelShape:
    """Holds the properties of a model that the rules of mixtures depend on.

    :ivar queries_per_key: query heads per KV head
    :ivar num_experts: experts per layer; 0 in dense models
    :ivar has_output: whether the output projection is a tensor of its own, not tied to the embeddings
    """

    num_layers: int
    queries_per_key: int = 1
    num_experts: int = 0
    has_output: bool = True


def is_quantizable(tensor: str, shape: tuple[int, ...]) -> bool:
    """Return whether mixtures quantize a tensor.

    :param tensor: its GGUF name
    """
    return len(shape) > 1 and tensor.endswith(".weight") and not _EXACT.search(tensor)


def writable_types() -> tuple[str, ...]:
    """Return the names of the types that tensors can be written as."""
    return (*PLAIN_TYPES, *(BLOCK_FORMATS[number].name for number in sorted(QUANTIZED_TYPES | TABLE_TYPES)))


def file_type(mixture: str) -> int:
    """Return llama.cpp's id of a mixture; the name is case-insensitive."""
    return _MIXTURES[mixture.strip().upper()][0]


def tensor_types(
    mixture: str,
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelShape,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, int]:
    """Return the ggml type id of each matrix that the mixture or an override covers; exact tensors are left out.

    :param mixture: one of :data:`MIXTURES`, case-insensitive
    :param shapes: the shape of each tensor, by GGUF name, in torch's order
    :param overrides: pairs of regular expression and type: the last expression that matches a tensor's name decides
    :raises ConfigError: a mixture or type is unknown, or an expression is invalid or matches no matrix
    :raises UnsupportedQuantizationError: a matrix has rows that do not divide into blocks of the type of an override
    """
    name = mixture.strip().upper()
    _must_not_be_codebooks(name)
    if name not in _MIXTURES:
        raise ConfigError.of("type", mixture, f"one of {', '.join(MIXTURES)}")
    patterns = [_override(pattern, type_) for pattern, type_ in overrides]
    unused = {pattern.pattern for pattern, _ in patterns}
    types: dict[str, int] = {}
    values = sorted((tensor for tensor in shapes if _VALUES.search(tensor)), key=_layer_of)
    for tensor, shape in shapes.items():
        if len(shape) < 2:
            continue
        chosen: str | None = None
        if is_quantizable(tensor, shape):
            chosen = fitting_type(_by_rule(name, tensor, model, values), shape[-1])
        for pattern, type_ in patterns:
            if pattern.search(tensor):
                unused.discard(pattern.pattern)
                chosen = _checked(tensor, type_, shape[-1])
        if chosen is not None:
            types[tensor] = tensor_type_of(chosen)
    if unused:
        raise ConfigError.of("overrides", min(unused), "regular expressions that are found in the name of a matrix")
    return types


def _override(pattern: str, type_: str) -> tuple[re.Pattern[str], str]:
    name = type_.strip().upper()
    _must_not_be_codebooks(name)
    if name not in writable_types():
        raise ConfigError.of("overrides", f"{pattern}={type_}", f"one of {', '.join(writable_types())} as the type")
    try:
        return re.compile(pattern), name
    except re.error as error:
        raise ConfigError.of("overrides", pattern, f"a regular expression ({error})") from None


def _must_not_be_codebooks(name: str) -> None:
    if _CODEBOOKS.fullmatch(name):
        raise UnsupportedQuantizationError(
            f"{name} is read, but not written: quantizing to its codebooks is not supported; types with similarly few "
            f"bits are Q2_K, TQ1_0 and TQ2_0",
            quantization=name,
            supported=writable_types(),
        )


def _checked(tensor: str, type_: str, cols: int) -> str:
    elements = BLOCK_FORMATS[tensor_type_of(type_)].elements
    if cols % elements:
        raise UnsupportedQuantizationError(
            f"tensor {tensor} has rows of {cols} elements, not a multiple of {elements}, the block size of {type_}",
            quantization=type_,
        )
    return type_


def fitting_type(type_: str, cols: int) -> str:
    """Return the type, or its replacement if rows do not divide into its blocks, or F16 if no quantized type fits."""
    if cols % BLOCK_FORMATS[tensor_type_of(type_)].elements == 0:
        return type_
    return fitting_type(_NARROW.get(type_, "F16"), cols)


def _by_rule(mixture: str, tensor: str, model: ModelShape, values: Sequence[str]) -> str:
    """Return the type that llama.cpp's rules give a matrix in a mixture.

    :param values: the names of all value projections, in the order of the layers, of which not all may have one
    """
    base = _MIXTURES[mixture][1]
    if base in PLAIN_TYPES:
        return base
    if mixture == "MXFP4_MOE":
        return base if "_exps." in tensor else "Q8_0"
    if tensor == ("output.weight" if model.has_output else "token_embd.weight"):
        return base if base == "Q8_0" else "Q6_K"
    if base in _TERNARY and tensor == "token_embd.weight":
        return "Q4_K"
    if _LAYER.match(tensor) is None:
        return base
    layer, num_layers = _layer_of(tensor), model.num_layers
    if tensor in values:
        return _of_values(mixture, base, values.index(tensor), len(values), model)
    if "attn_k." in tensor and model.num_experts == 8:
        return "Q8_0"
    if "attn_output." in tensor:
        if model.num_experts == 8:
            return "Q5_K" if base in _OF_FEW_BITS and mixture != "Q3_K_L" else base
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mixture, base)
    if "ffn_down" in tensor:
        return _of_mlp_outputs(mixture, base, layer, num_layers)
    return base


def _of_mlp_outputs(mixture: str, base: str, layer: int, num_layers: int) -> str:
    match mixture:
        case "Q2_K":
            return "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if layer < num_layers // 16 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_S" | "IQ4_NL" | "IQ4_XS":
            return "Q5_K" if layer < num_layers // 8 else base
        case "Q4_K_M" | "Q5_K_M":
            return "Q6_K" if _is_sensitive(layer, num_layers) else base
    return base


def _of_values(mixture: str, base: str, place: int, count: int, model: ModelShape) -> str:
    """Return the type of a value projection, alone or fused with queries and keys.

    :param place: its index among the model's ``count``
    """
    if model.num_experts == 8:
        return "Q8_0"
    chosen = base
    match mixture:
        case "Q2_K":
            chosen = "Q4_K" if model.queries_per_key >= 4 else "Q3_K"
        case "Q3_K_M":
            chosen = "Q5_K" if place < 2 else "Q4_K"
        case "Q3_K_L":
            chosen = "Q5_K"
        case "Q4_K_S":
            chosen = "Q5_K" if place < 4 else base
        case "IQ4_NL" | "IQ4_XS":
            chosen = "Q5_K" if model.queries_per_key >= 4 else base
        case "Q4_K_M" | "Q5_K_M":
            chosen = "Q6_K" if _is_sensitive(place, count) else base
    # A 70B model (80 layers, 8 query heads per KV head): its value projections are so small that more bits cost little.
    is_70b = model.num_layers == 80 and model.queries_per_key == 8
    return "Q5_K" if is_70b and chosen in ("Q3_K", "Q4_K") else chosen


def _layer_of(tensor: str) -> int:
    match = _LAYER.match(tensor)
    assert match is not None, f"{tensor} is of no layer"
    return int(match[1])


def _is_sensitive(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
