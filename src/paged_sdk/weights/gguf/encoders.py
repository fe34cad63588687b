"""Make the configs of GGUF's encoders (bidirectional attention), as transformers' classes expect them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from paged_sdk.errors import shown
from paged_sdk.weights.gguf.model import GgufModel
from paged_sdk.weights.gguf.names import RANK_HEAD

__all__ = ["ENCODERS"]

_RANKS: Final = 4  # the pooling_type of rankers
_POOLINGS: Final = MappingProxyType({1: "mean", 2: "cls"})
_MODERN_BERT_PERIOD: Final = 3  # every third layer has no window
_ACTIVATIONS: Final = ("gelu", "silu")


def _bert(model: GgufModel) -> dict[str, Any]:
    """Return the settings of BERT, XLM-RoBERTa and others with BERT's layers. In GGUF, row 0 of the position table is
    always the first token's; the original table may have an offset.
    """
    layers = [name for name in ("cls.weight", RANK_HEAD) if name in model.tensors]
    if len(layers) == 1:
        # Converters drop the pooler of BERT's own rankers.
        raise model.unsupported(f"a tensor {shown(layers[0])} that is to rank texts alone")
    if layers and "token_types.weight" not in model.tensors:
        raise model.unsupported("layers that rank texts as DistilBERT's do")
    return _encoder(model, "BertModel", "BertForSequenceClassification") | {
        "max_position_embeddings": model.tensor("position_embd.weight").shape[0],
        "type_vocab_size": _num_parts(model),
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
    }


def _nomic_bert(model: GgufModel) -> dict[str, Any]:
    return _encoder(model, "NomicBertModel") | {"type_vocab_size": _num_parts(model), **_rope(model)}


def _modern_bert(model: GgufModel) -> dict[str, Any]:
    theta = model.number("rope.freq_base", 10_000.0)
    thetas = {"full_attention": theta, "sliding_attention": model.number("rope.freq_base_swa", 10_000.0)}
    activation = model.metadata.get("modern-bert.hidden_activation", "gelu")
    if activation not in _ACTIVATIONS:
        raise model.unsupported(f"metadata modern-bert.hidden_activation = {shown(activation)}")
    pooling = model.integer("classifier.pooling_type", 1)
    if pooling not in _POOLINGS:
        raise model.unsupported(f"metadata modern-bert.classifier.pooling_type = {pooling}")
    window = model.integer("attention.sliding_window", 0, minimum=0)
    return _encoder(model, "ModernBertModel", "ModernBertForSequenceClassification") | {
        # A window of twice the context length covers every text.
        "local_attention": min(window, 2 * model.integer("context_length")),
        "layer_types": _layer_types(model, window),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": each} for kind, each in thetas.items()},
        "hidden_activation": activation,
        "classifier_pooling": _POOLINGS[pooling],
        "classifier_bias": "cls.bias" in model.tensors,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def _eurobert(model: GgufModel) -> dict[str, Any]:
    return _encoder(model, "EuroBertModel") | {
        "attention_bias": False,
        "mlp_bias": False,
        "mask_token_id": 0,
        **_rope(model),
    }


def _encoder(model: GgufModel, class_name: str, ranker: str | None = None) -> dict[str, Any]:
    """Return the settings that all encoders share.

    :param class_name: transformers' class of the encoder
    :param ranker: transformers' class with a classification head; None: GGUF has no such files
    """
    table, width = model.tensor("token_embd.weight").shape, model.integer("embedding_length")
    if table[1:] != (width,):
        raise model.malformed(f"token_embd.weight has shape {list(table)}: expected rows of {width}")
    if model.metadata.get(f"{model.architecture}.attention.causal", False):
        raise model.unsupported(f"metadata {model.architecture}.attention.causal = true")
    labels = model.tensors.get(RANK_HEAD)
    if labels is None and model.number("pooling_type", 0) == _RANKS:
        raise model.malformed(f"metadata {model.architecture}.pooling_type is {_RANKS}, and there is no {RANK_HEAD}")
    named = [class_name] if labels is None or ranker is None else [ranker]
    num_labels = {} if labels is None else {"num_labels": labels.shape[0]}
    # Padding is not used, but transformers' default id may be outside of a small vocabulary.
    return {"architectures": named, "pad_token_id": 0, **num_labels}


def _num_parts(model: GgufModel) -> int:
    """Return the number of token types, which distinguish the two texts of a pair."""
    table = model.tensors.get("token_types.weight")
    return 1 if table is None else table.shape[0]


def _rope(model: GgufModel) -> dict[str, Any]:
    theta = model.number("rope.freq_base", 10_000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _layer_types(model: GgufModel, window: int) -> list[str]:
    """Return the attention type of each layer of ModernBERT."""
    key = "modern-bert.attention.sliding_window_pattern"
    if window == 0:
        windowed = [False] * model.num_layers
    elif isinstance(pattern := model.metadata.get(key, _MODERN_BERT_PERIOD), list):
        windowed = [bool(each) for each in pattern]
        if len(windowed) != model.num_layers:
            raise model.malformed(f"metadata {key} has {len(windowed)} entries for {model.num_layers} layers")
    else:
        period = model.integer("attention.sliding_window_pattern", _MODERN_BERT_PERIOD)
        windowed = [layer % period != 0 for layer in range(model.num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


ENCODERS: Final[Mapping[str, Callable[[GgufModel], dict[str, Any]]]] = MappingProxyType(
    {"bert": _bert, "nomic-bert": _nomic_bert, "modern-bert": _modern_bert, "eurobert": _eurobert}
)
"""Functions that make the encoder's own part of a config, by GGUF architecture."""
