"""Write tiny encoders as GGUF files, as llama.cpp's converter does: names by the gguf package's map of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

from gguf_files import add_metadata

__all__ = ["word_piece_metadata", "write_encoder"]

_ARCHITECTURES: Final[Mapping[str, gguf.MODEL_ARCH]] = MappingProxyType(
    {
        **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "camembert"), gguf.MODEL_ARCH.BERT),
        "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
        "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
        "eurobert": gguf.MODEL_ARCH.EUROBERT,
        "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
    }
)
_PREFIXES: Final = ("bert.", "roberta.", "distilbert.", "nomic_bert.")
_MODEL_PREFIX: Final = ("modernbert", "eurobert")
# What predicts words, or makes one vector of a text; files have neither.
_NOT_WRITTEN: Final = ("cls.", "lm_head.", "vocab_", "pooler.", "decoder.")
_POOLINGS: Final = MappingProxyType({"mean": 1, "cls": 2})


def write_encoder(
    directory: Path, path: Path, *, quantization: str = "F32", tokenizer: Mapping[str, Any], **own: Any
) -> Path:
    """Write a checkpoint of transformers as a file.

    :param quantization: the type of all matrices but those that llama.cpp keeps as they are
    :param tokenizer: its metadata
    :param own: keys of the architecture, with two underscores for a dot
    :returns: ``path``
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name)
    values = _values(config) | {key.replace("__", "."): value for key, value in own.items()}
    parts = {"tokenizer.ggml.token_type_count": config.get("type_vocab_size", 1)}
    add_metadata(writer, {f"{name}.{key}": value for key, value in values.items()} | parts | dict(tokenizer))
    kind = gguf.GGMLQuantizationType[quantization]
    plain = gguf.GGMLQuantizationType.F32
    for tensor, array in _tensors(config, load_file(directory / "model.safetensors"), architecture).items():
        is_exact = array.ndim < 2 or array.shape[0] == 1 or tensor.startswith(("position_embd", "token_types"))
        type_ = plain if is_exact else kind
        writer.add_tensor(tensor, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def word_piece_metadata(tokenizer: tokenizers.Tokenizer, num_tokens: int, **own: Any) -> dict[str, Any]:
    """Return the metadata of a tokenizer of word pieces, which files spell in another way.

    :param num_tokens: the model's, which may be more
    :param own: keys of ``tokenizer.ggml``, with two underscores for a dot; None: the file lacks it
    """
    added = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    known = {id: piece for piece, id in tokenizer.get_vocab().items()}
    pieces = [known.get(id, f"[PAD{id}]") for id in range(num_tokens)]
    spelled = [
        piece if id in added else piece[2:] if piece.startswith("##") else f"▁{piece}"
        for id, piece in enumerate(pieces)
    ]
    values = {
        "model": "bert",
        "pre": "default",
        "tokens": spelled,
        "token_type": [3 if id in added else 1 if id in known else 5 for id in range(num_tokens)],
        "bos_token_id": tokenizer.token_to_id("[CLS]"),
        "eos_token_id": tokenizer.token_to_id("[SEP]"),
        "unknown_token_id": tokenizer.token_to_id("[UNK]"),
        "seperator_token_id": tokenizer.token_to_id("[SEP]"),
        "padding_token_id": tokenizer.token_to_id("[PAD]"),
        "mask_token_id": tokenizer.token_to_id("[MASK]"),
        "add_bos_token": True,
        "add_eos_token": True,
        "add_sep_token": False,
    } | {key.replace("__", "."): value for key, value in own.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture's keys."""

    def first(*names: str, default: Any = None) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), default)

    heads, rope = first("num_attention_heads", "n_heads"), config.get("rope_parameters") or {}
    values = {
        "block_count": first("num_hidden_layers", "n_layers"),
        "embedding_length": first("hidden_size", "dim"),
        "feed_forward_length": first("intermediate_size", "hidden_dim"),
        "context_length": config["max_position_embeddings"] - _first_position(config),
        "attention.head_count": heads,
        "attention.head_count_kv": first("num_key_value_heads", default=heads),
        "attention.causal": False,
        "attention.layer_norm_epsilon": float(first("layer_norm_eps", "norm_eps", default=1e-12)),
        "attention.layer_norm_rms_epsilon": float(first("rms_norm_eps", default=1e-6)),
    }
    if config["model_type"] in ("modernbert", "gemma3_text"):
        values |= {
            "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
            "attention.sliding_window": first("local_attention", "sliding_window"),
        }
    elif rope:
        values["rope.freq_base"] = float(rope["rope_theta"])
    if config["model_type"] == "modernbert":
        values["classifier.pooling_type"] = _POOLINGS[config["classifier_pooling"]]
        values["hidden_activation"] = config["hidden_activation"]
    if config["model_type"] in ("eurobert", "gemma3_text"):
        values |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    return values


def _first_position(config: Mapping[str, Any]) -> int:
    counts_from_padding = config["model_type"] in ("roberta", "xlm-roberta", "camembert")
    return int(config["pad_token_id"]) + 1 if counts_from_padding else 0


def _tensors(config: Mapping[str, Any], stored: Mapping[str, Any], architecture: gguf.MODEL_ARCH) -> dict[str, Any]:
    """Return the file's tensors by their names there."""
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layers"])
    found = {}
    for name, array in stored.items():
        own = name
        for prefix in _PREFIXES:
            own = own.removeprefix(prefix)
        if config["model_type"] in _MODEL_PREFIX:
            own = own.removeprefix("model.")
        if own.startswith(_NOT_WRITTEN):
            continue
        if architecture is gguf.MODEL_ARCH.GEMMA_EMBEDDING:
            own = f"model.{own.removeprefix('model.')}"
        if own in ("classifier.weight", "classifier.bias"):  # a head of one matrix, or after another one
            own = own.replace("classifier", "classifier.out_proj")
        if own == "embeddings.position_embeddings.weight":
            array = array[_first_position(config) :]
        tensor = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert tensor is not None, own
        is_norm = architecture is gguf.MODEL_ARCH.GEMMA_EMBEDDING and tensor.endswith("norm.weight")
        found[tensor] = (array + 1 if is_norm else array).astype(np.float32)
    return found
