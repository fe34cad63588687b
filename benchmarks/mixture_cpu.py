"""Time layers with mixtures of experts on the CPU: `python -m benchmarks.mixture_cpu [--shape NAME] [--layers N]`.

Layers of a known model's shape, with random weights in Q4_K, run one operation at a time and in one native call per
step, in turns. Tokens differ from step to step, so experts are read from memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from benchmarks.gpu.random_model import SHAPES, RandomSource, Shape
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.native.library import Workspace, load, why_not
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.types.step import StepRow

__all__ = ["Figures", "Layers"]

_COMMON: Final = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
}


def _shared(hidden: int, size: int, name: str = "shared_experts") -> dict[str, tuple[int, ...]]:
    """Return the tensors of shared experts."""
    inner, outer = (size, hidden), (hidden, size)
    shapes = {"gate_proj": inner, "up_proj": inner, "down_proj": outer}
    return {f"mlp.{name}.{matrix}.weight": shape for matrix, shape in shapes.items()}


# Biases of queries, keys and values, which some of them have, are left out.
_SHAPES: Final = {
    "qwen3-30b-a3b": SHAPES["qwen3_moe"],
    "qwen1.5-moe-a2.7b": Shape(
        "Qwen1.5-MoE-A2.7B",
        _COMMON
        | {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "qkv_bias": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        others=_shared(2048, 5632, "shared_expert") | {"mlp.shared_expert_gate.weight": (1, 2048)},
    ),
    "glm-4.5-air": Shape(
        "GLM-4.5-Air",
        _COMMON
        | {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 0,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
        others=_shared(4096, 1408) | {"mlp.gate.e_score_correction_bias": (128,)},
    ),
    "ernie-4.5-21b-a3b": Shape(
        "ERNIE-4.5-21B-A3B",
        _COMMON
        | {
            "model_type": "ernie4_5_moe",
            "hidden_size": 2560,
            "intermediate_size": 12_288,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_layer_start_index": 0,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
        },
        others=_shared(2560, 3072) | {"mlp.moe_statics.e_score_correction_bias": (64,)},
    ),
    "deepseek-v2-lite": Shape(
        "DeepSeek-V2-Lite",
        _COMMON
        | {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        others=_shared(2048, 2816),
    ),
    "glm-4.7-flash": Shape(
        "GLM-4.7-Flash",
        _COMMON
        | {
            "model_type": "glm4_moe_lite",
            "hidden_size": 2048,
            "intermediate_size": 10_240,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
        others=_shared(2048, 1536) | {"mlp.gate.e_score_correction_bias": (64,)},
    ),
}
_BLOCK_SIZE: Final = 32
_ROUNDS: Final = 15


class _TimedExperts(Experts):
    """Wraps experts and measures their time.

    :ivar seconds: total time since it was last set to 0
    """

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.seconds = 0.0

    @property
    def num_bytes(self) -> int:
        return self._experts.num_bytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self._experts.forward(x, topk_weights, topk_ids)
        self.seconds += time.perf_counter() - start
        return out


@frozen
class Figures:
    """Holds medians, in seconds of one layer.

    :ivar separate: time with one operation at a time
    :ivar experts: the experts' part of ``separate``
    :ivar fused: time in one native call
    """

    separate: float
    experts: float
    fused: float


class Layers:
    """Holds a random model that can run in both ways.

    :param shape: the model's shape; its layers should be larger than the cache
    :param num_tokens: maximum total context length of a step's sequences
    """

    def __init__(self, shape: Shape, workspace: Workspace, *, num_tokens: int) -> None:
        device = torch.device("cpu")
        self._model = load_model(
            shape.config,
            RandomSource(shape, device, quantized=True),
            dtype=torch.bfloat16,
            placement=device,
            policy=WeightPolicy(keep_blocks=True, workspace=workspace),
        )
        settings = PoolSettings(block_size=_BLOCK_SIZE, dtype=torch.bfloat16, device=device)
        self._backend = NativePagedBackend(
            self._model.config, settings, num_tokens // _BLOCK_SIZE, workspace=workspace, precision=Precision.INT8
        )
        self._fused = FusedDecoderModel(self._model, self._backend)
        self._experts = []
        for layer in self._model.layers:
            assert isinstance(layer.mlp, MoeMlp)
            layer.mlp.experts = _TimedExperts(layer.mlp.experts)
            self._experts.append(layer.mlp.experts)

    def measure(self, num_sequences: int, num_new: int, num_before: int = 0) -> Figures:
        """Time a step of sequences that have ``num_new`` tokens each, after ``num_before`` others."""
        blocks = -(-(num_before + num_new) // _BLOCK_SIZE)
        tables = [range(i * blocks, (i + 1) * blocks) for i in range(num_sequences)]
        num_prompt = num_before + (num_new if num_new > 1 else 0)
        rows = [
            StepRow(i, num_before, [0] * num_new, table, num_prompt, num_logits=num_new)
            for i, table in enumerate(tables)
        ]
        if num_before:
            before = [StepRow(row.seq_id, 0, [0] * num_before, row.kv_ids, num_before) for row in rows]
            self._seconds(self._fused, before)
        separate, experts, fused = [], [], []
        for _ in range(_ROUNDS):
            for each in self._experts:
                each.seconds = 0.0
            separate.append(self._seconds(self._model, rows))
            experts.append(sum(each.seconds for each in self._experts))
            fused.append(self._seconds(self._fused, rows))
        return Figures(*(statistics.median(times) / len(self._experts) for times in (separate, experts, fused)))

    def _seconds(self, model: CausalModel, rows: Sequence[StepRow]) -> float:
        """Time one step with new random tokens."""
        num_tokens = sum(row.num_new_tokens for row in rows)
        token_ids = torch.randint(self._model.config.vocab_size, (num_tokens,))
        positions = torch.cat([torch.arange(row.start, row.start + row.num_new_tokens) for row in rows])
        with torch.inference_mode():
            context = StepContext(attention=self._backend.prepare(rows))
            start = time.perf_counter()
            model.forward(token_ids, positions, context)
            return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(_SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4, help="0.3 GB each, GLM-4.5-Air's 1.3")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    library = load()
    if library is None:
        raise SystemExit(f"the native kernels are not available: {why_not()}")
    torch.set_num_threads(options.threads)
    shape = _SHAPES[options.shape]
    # The size of the vocabulary does not affect the figures. GLM-4.7-Flash's config lists its layers; others ignore it.
    others = {"vocab_size": 4096, "mlp_layer_types": ["sparse"] * options.layers}
    few = evolve(shape, config={**shape.config, "num_hidden_layers": options.layers, **others})
    layers = Layers(few, Workspace(library, num_threads=options.threads), num_tokens=16 * 256)
    print(f"{shape.name}, Q4_K, {library.isa}, {options.threads} threads: us a layer")
    print(f"{'':36} one by one | experts | the rest | fused")
    for title, step in (
        ("decode, 1 stream after 128 tokens", (1, 1, 128)),
        ("decode, 4 streams after 128 tokens", (4, 1, 128)),
        ("decode, 16 streams after 128 tokens", (16, 1, 128)),
        ("a prompt of 512 tokens", (1, 512)),
    ):
        figures = layers.measure(*step)
        cells = figures.separate, figures.experts, figures.separate - figures.experts, figures.fused
        print(f"{title:36} " + " | ".join(f"{seconds * 1e6:8.0f}" for seconds in cells))


if __name__ == "__main__":
    main()
