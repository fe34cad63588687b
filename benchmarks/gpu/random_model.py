"""Make models of usual shapes with random weights on the device; they are as fast as trained ones."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import tokenizers
import torch
from attrs import frozen
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.inside import OpenEngine, open_engine
from paged_sdk import TextModelBuilder
from paged_sdk.build import loaded_model
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.weights.checkpoint import Checkpoint

__all__ = ["SHAPES", "TINY_SHAPES", "RandomSource", "Shape", "open_random_engine"]

_Q4_K: Final = tensor_type_of("Q4_K")
_Q5_0: Final = tensor_type_of("Q5_0")


@frozen
class Shape:
    """Describes a model without its weights.

    :ivar config: content of ``config.json``
    :ivar others: further tensors of each layer, by the end of their names
    """

    name: str
    config: Mapping[str, Any]
    others: Mapping[str, tuple[int, ...]] = {}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, by their names in a checkpoint."""
        config = self.config
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
        for layer in range(config["num_hidden_layers"]):
            own = {f"{name}.weight": shape for name, shape in (self._attention | self._mlp).items() if shape}
            shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in (own | {**self.others}).items()})
        # Experts are stacked, in tensors whose names do not end in ".weight".
        return {name.removesuffix(".weight") if ".experts." in name else name: shape for name, shape in shapes.items()}

    @property
    def read_per_token(self) -> int:
        """Return how many weights decoding one token reads: all except embeddings and experts that are not selected."""
        share = self.config.get("num_experts_per_tok", 1) / self.config.get("num_experts", 1)
        sizes = {name: torch.Size(shape).numel() for name, shape in self.tensors.items() if "embed_tokens" not in name}
        return round(sum(size * (share if ".experts." in name else 1) for name, size in sizes.items()))

    def kv_elements(self, depth: int) -> int:
        """Return how many elements of keys and values are read to decode one token after ``depth`` others."""
        layers, heads, size = (self.config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        return 2 * int(layers * heads * size) * depth

    @property
    def _attention(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        if "kv_lora_rank" in config:
            return self._latent_attention
        hidden, size = config["hidden_size"], config["head_dim"]
        query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        head_norm = (size,) if config["model_type"].startswith("qwen3") else ()
        return {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": head_norm,
            "self_attn.k_norm": head_norm,
        }

    @property
    def _latent_attention(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
        rope, nope, value = (config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        queries, query_rank = heads * (nope + rope), config["q_lora_rank"]
        norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if query_rank is None:
            query: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (queries, hidden)}
        else:
            query = {
                "self_attn.q_a_proj": (query_rank, hidden),
                "self_attn.q_a_layernorm": (query_rank,),
                "self_attn.q_b_proj": (queries, query_rank),
            }
        return {
            **norms,
            **query,
            "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
            "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * (nope + value), rank),
            "self_attn.o_proj": (hidden, heads * value),
        }

    @property
    def _mlp(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden = config["hidden_size"]
        names = ("num_experts", "n_routed_experts", "moe_num_experts")
        if num_experts := next((config[name] for name in names if name in config), None):
            size = config["moe_intermediate_size"]
            return {
                "mlp.gate": (num_experts, hidden),
                "mlp.experts.gate_up_proj": (num_experts, 2 * size, hidden),
                "mlp.experts.down_proj": (num_experts, hidden, size),
            }
        size = config["intermediate_size"]
        return {"mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden), "mlp.down_proj": (hidden, size)}


_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131_072,
}
_QWEN3_MOE: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_TINY: Final = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}

SHAPES: Final = {
    "llama": Shape(
        "Llama-3.1-8B",
        _LLAMA
        | {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "qwen3_moe": Shape(
        "Qwen3-30B-A3B",
        _QWEN3_MOE
        | {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
TINY_SHAPES: Final = {
    "llama": Shape("a tiny llama", _LLAMA | _TINY),
    "qwen3_moe": Shape(
        "a tiny mixture of experts",
        _QWEN3_MOE | _TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}


class RandomSource:
    """Implements a :class:`~paged_sdk.weights.source.WeightSource` of random numbers.

    :param device: the device that matrices are made on
    :param quantized: whether matrices are Q4_K blocks, or Q5_0 where rows are no multiple of 256; experts are then
        separate matrices
    """

    def __init__(self, shape: Shape, device: torch.device, *, quantized: bool) -> None:
        self._shapes = _unstacked(shape.tensors) if quantized else shape.tensors
        self._device = device
        self._quantized = quantized

    def names(self) -> Collection[str]:
        return self._shapes

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        return self.matrix(name).decoded(dtype).to(device).view(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def matrix(self, name: str) -> StoredMatrix:
        shape = self._shapes[name]
        if not self._quantized or len(shape) != 2:
            size = (math.prod(shape[:-1]), shape[-1])
            values = torch.empty(size, dtype=torch.bfloat16, device=self._device).normal_(std=shape[-1] ** -0.5)
            return DenseMatrix(values)
        kind = _Q5_0 if shape[1] % BLOCK_FORMATS[_Q4_K].elements else _Q4_K
        form = BLOCK_FORMATS[kind]
        num_blocks = shape[1] // form.elements
        blocks = torch.randint(256, (shape[0], num_blocks, form.num_bytes), dtype=torch.uint8, device=self._device)
        # A weight is scale * (6-bit scale) * (4-bit code) - minimum, or scale * (5-bit code - 16); these values keep
        # weights small and around zero.
        scale = shape[1] ** -0.5 / 200
        numbers = [scale, 7.5 * scale] if kind == _Q4_K else [20 * scale]
        blocks[..., : 2 * len(numbers)] = torch.tensor(numbers, dtype=torch.float16).view(torch.uint8).to(self._device)
        return BlockMatrix(kind, blocks.view(shape[0], -1))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _unstacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes with a separate tensor for each matrix of each expert, named as in a GGUF file."""
    matrices: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        block, is_experts, projection = name.partition(".experts.")
        if not is_experts:
            matrices[name] = shape
            continue
        num_experts, rows, cols = shape
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for expert in range(num_experts):
            for part in parts:
                matrices[f"{block}.experts.{expert}.{part}.weight"] = rows // len(parts), cols
    return matrices


@contextmanager
def open_random_engine(
    shape: Shape,
    device: torch.device,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int | None = None,
    quantized: bool = False,
) -> Iterator[OpenEngine]:
    """Open an engine with a random model within this context, assembled as in an application.

    :param max_num_batched_tokens: token budget of a step; None: the default
    :param quantized: whether matrices are in Q4_K
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = dict(shape.config)
        _tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
        (directory / "config.json").write_text(json.dumps(config))
        source = RandomSource(shape, device, quantized=quantized)
        checkpoint = Checkpoint(path=directory, config=config, source=source)
        builder = (
            TextModelBuilder(directory)
            .with_device(str(device))
            .with_max_model_len(max_model_len)
            .with_max_num_seqs(max_num_seqs)
        )
        if max_num_batched_tokens is not None:
            builder = builder.with_max_num_batched_tokens(max_num_batched_tokens)
        with patch.object(loaded_model, "open_checkpoint", lambda _: checkpoint):
            engine = open_engine(builder)
        yield engine


def _tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Return a tokenizer in which every token has a text: first the bytes, then words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"Ġw{number}" for number in range(vocab_size - len(alphabet)))]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
