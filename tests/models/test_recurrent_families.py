"""Families whose layers partly keep a state per sequence: each is what transformers computes, however its prompt is cut
and whatever is computed beside it.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from odd_configs import reference_of
from reference_decoding import CPU, DictSource, ours, random_prompt, reference_greedy
from shared_configs import MULTIPLIERS
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from native_weights import needs_library, workspace
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.no_attention import NoAttention
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.recurrent import StatefulBackend
from paged_sdk.build.fusing import fuse
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.any_model import plan_model
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import read_config
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.types.step import StepRow

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_CONV: Final = {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16}
_DELTA: Final = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: Final = _EXPERTS | {"shared_expert_intermediate_size": 48}
_MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_GRANITE: Final = _MAMBA | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
}
_FALCON: Final = _MAMBA | {"mamba_d_ssm": 128, "head_dim": 16}
_NEMOTRON: Final = {
    "model_type": "nemotron_h",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "head_dim": 16,
    "time_step_min": 1e-30,  # transformers' least step, of prompts alone
}
_UNGATED: Final = _NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "lfm2": _CONV,
    "lfm2 with biases": {"model_type": "lfm2", **_CONV, "conv_bias": True, "conv_L_cache": 5},
    "lfm2_moe": _CONV | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "qwen3_next": _DELTA | _SHARED | {"mlp_only_layers": [1], "attention_bias": True},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED,
    "granitemoehybrid": _GRANITE
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "granitemoehybrid with positions and biases": {
        "model_type": "granitemoehybrid",
        **_GRANITE,
        "position_embedding_type": "rope",
        "attention_bias": True,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
    },
    "granitemoehybrid with experts": {
        "model_type": "granitemoehybrid",
        **_GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True},
    "falcon_h1": _FALCON
    | {
        "attention_bias": True,
        "projectors_bias": True,
        **MULTIPLIERS,
    },
    "falcon_h1 with a norm": {"model_type": "falcon_h1", **_FALCON, "mamba_rms_norm": True},
    "falcon_h1 with a norm after gates": {
        "model_type": "falcon_h1",
        **_FALCON,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "nemotron_h": _NEMOTRON
    | {
        "layers_block_type": [
            *("linear_attention", "mlp", "full_attention", "linear_attention"),
            *("linear_attention", "mlp"),
        ],
        "use_bias": True,
        "mlp_bias": True,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "use_bias": True},
    "nemotron_h with experts": _UNGATED,
    "nemotron_h with experts of latent vectors": _UNGATED
    | {"moe_latent_size": 32, "mlp_bias": True, "n_group": 2, "norm_topk_prob": False},
}
NATIVE: Final[dict[str, dict[str, Any]]] = {
    "lfm2": _CONV | {"conv_bias": True, "conv_L_cache": 5},
    "qwen3_next": _DELTA | _SHARED | {"linear_value_head_dim": 16},
    "qwen3_5_text": _DELTA | {"linear_value_head_dim": 48},
    **{name: CONFIGS[name] for name in ("granitemoehybrid", "falcon_h1", "falcon_h1 with a norm", "nemotron_h")},
}
"""Models whose sizes the native kernels have."""
PROMPT: Final = random_prompt(150)


@functools.cache
def models(family: str) -> tuple[PreTrainedModel, DecoderModel]:
    reference = reference_model(family, CONFIGS[family])
    return reference, ours(reference)


def reference_model(family: str, config: dict[str, Any]) -> PreTrainedModel:
    """Build a model of transformers, with other numbers than ones and zeros where it would have these."""
    with tempfile.TemporaryDirectory() as directory:
        reference = reference_of(_COMMON | {"model_type": family} | config, Path(directory))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in reference.state_dict().items():
        if name.endswith(("expert_bias", "correction_bias")):
            tensor.copy_(torch.tensor([0.5, -0.2, 0.1, 0.3]))
        if name.endswith((".D", ".dt_bias", "mamba.norm.weight", "mixer.norm.weight", "conv1d.bias", "_proj.bias")):
            tensor.add_(torch.rand(tensor.shape, generator=generator) - 0.5)
    return reference


def reference_scores(reference: PreTrainedModel) -> Tensor:
    """Return the logits of the prompt. Gated delta networks run one token at a time: over chunks, transformers' float32
    differs from that by 3e-4 of the largest logit, since it subtracts sums of decays.
    """
    pieces = [[token] for token in PROMPT] if hasattr(reference.config, "linear_num_key_heads") else [PROMPT]
    cache, scores = None, list[Tensor]()
    with torch.inference_mode():
        for piece in pieces:
            output = reference(torch.tensor([piece]), past_key_values=cache, use_cache=len(pieces) > 1)
            cache = output.get("past_key_values")
            scores.append(output.logits[0])
    return torch.cat(scores)


def backend_of(
    model: DecoderModel,
    cache_type: PagedCacheType | None = None,
    workspace: Workspace | None = None,
    num_drafts: int = 0,
) -> StatefulBackend:
    """Make memory for four texts: contiguous KV, or a pool. With a workspace, recurrent layers run natively, as
    does attention over a pool.

    :param num_drafts: most drafts of a text per step
    """
    attending = model.config.of_layers(model.config.attention_layers)
    inner: AttentionBackend = ContiguousBackend(attending, dtype=model.dtype, device=CPU)
    if not model.config.attention_layers:
        inner = NoAttention(workspace)
    elif cache_type is not None:
        settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU, cache_type=cache_type)
        native = None if workspace is None else partial(NativePagedBackend, workspace=workspace)
        inner = (native or PagedBackend)(attending, settings, 64)
    return StatefulBackend(
        inner, model.config, num_slots=4, num_drafts=num_drafts, dtype=model.dtype, device=CPU, workspace=workspace
    )


def step(
    model: CausalModel,
    backend: AttentionBackend,
    rows: Sequence[tuple[Sequence[int], int, int]],
    num_drafts: int = 0,
) -> list[Tensor]:
    """Run one step.

    :param rows: per row its new tokens, how many came before, and its slot
    :param num_drafts: how many of each row's tokens, the last ones, are drafts
    """
    is_paged = isinstance(backend, StatefulBackend) and isinstance(backend._inner, PagedBackend)
    step_rows = [
        StepRow(
            slot,
            start,
            tokens,
            range(slot * 16, slot * 16 + 16) if is_paged else [slot],
            start + len(tokens),
            num_logits=len(tokens),
            num_drafts=num_drafts,
            state_slot=slot,
        )
        for tokens, start, slot in rows
    ]
    token_ids = torch.tensor([token for tokens, _, _ in rows for token in tokens])
    positions = torch.cat([torch.arange(start, start + len(tokens)) for tokens, start, _ in rows])
    with torch.inference_mode():
        hidden = model.forward(token_ids, positions, StepContext(attention=backend.prepare(step_rows)))
        return list(torch.split(model.logits(hidden), [len(tokens) for tokens, _, _ in rows]))


def greedy(model: DecoderModel, prompt: Sequence[int], num_tokens: int, chunk: int) -> list[int]:
    backend, text, start = backend_of(model, PagedCacheType.AUTO), list(prompt), 0
    while len(text) < len(prompt) + num_tokens:
        new = text[start : start + chunk]
        (scores,) = step(model, backend, [(new, start, 2)])
        start += len(new)
        if start == len(text):
            text.append(int(scores[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_and_logits_are_those_of_transformers(family: str) -> None:
    reference, model = models(family)
    scores = reference_scores(reference)
    (own,) = step(model, backend_of(model), [(PROMPT, 0, 1)])
    assert (own - scores).abs().max() < 1e-4 * scores.abs().max()
    expected = reference_greedy(reference, PROMPT, 6)
    assert len(set(expected)) > 1
    assert greedy(model, PROMPT, 6, chunk=71) == greedy(model, PROMPT, 6, chunk=len(PROMPT)) == expected


@pytest.mark.parametrize("family", CONFIGS)
def test_chunks_and_neighbours_change_nothing(family: str) -> None:
    """In float64, logits of any chunks are the same, beside decodes and other chunks, and in a slot that holds NaN."""
    reference, _ = models(family)
    exact = ours(reference, dtype=torch.float64)
    (expected,) = step(exact, backend_of(exact), [(PROMPT, 0, 0)])
    backend = backend_of(exact)
    for states in backend._states.values():
        for state in states:
            state.fill_(torch.nan)
    other = random_prompt(90, seed=3)
    (alone,) = step(exact, backend_of(exact), [(other, 0, 0)])
    got, got_other = list[Tensor](), list[Tensor]()
    for (first, last), (begin, end) in zip(
        [(0, 40), (40, 41), (41, 42), (42, 150)], [(0, 2), (2, 70), (70, 71), (71, 90)], strict=True
    ):
        parts = step(exact, backend, [(other[begin:end], begin, 3), (PROMPT[first:last], first, 1)])
        got_other.append(parts[0])
        got.append(parts[1])
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=1e-5)  # logits are float32
    torch.testing.assert_close(torch.cat(got_other), alone, rtol=0, atol=1e-5)


@needs_library
@pytest.mark.parametrize("family", NATIVE)
def test_native_layers_compute_the_same(family: str) -> None:
    """Of one prompt alone, and of the same in chunks beside another, in slots that hold NaN.

    The judge is the model in float64, whose operations the tests above compare with transformers: in float32,
    transformers' own chunks of qwen3_next are off by five times as much as the native rule.
    """
    reference = reference_model(family, NATIVE[family])
    model, exact, other = ours(reference), ours(reference, dtype=torch.float64), random_prompt(90, seed=3)
    expected, alone = (step(exact, backend_of(exact), [(prompt, 0, 0)])[0] for prompt in (PROMPT, other))
    (own,) = step(model, backend_of(model, workspace=workspace()), [(PROMPT, 0, 1)])
    assert (own - expected).abs().max() < 1e-4 * expected.abs().max()
    backend = backend_of(model, PagedCacheType.AUTO, workspace())
    for states in backend._states.values():
        for state in states:
            state.fill_(torch.nan)
    with unused_torch_layers():
        first, begun = step(model, backend, [(other[:2], 0, 3), (PROMPT[:40], 0, 1)])
        second, rest = step(model, backend, [(other[2:], 2, 3), (PROMPT[40:], 40, 1)])
    assert (torch.cat([begun, rest]) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (torch.cat([first, second]) - alone).abs().max() < 1e-4 * alone.abs().max()


@contextmanager
def unused_torch_layers() -> Iterator[None]:
    """Check that no recurrent layer runs on torch operations."""
    with (
        patch("paged_sdk.models.short_conv_block.short_conv") as conv,
        patch("paged_sdk.models.gated_delta_block.gated_delta_rule") as rule,
        patch("paged_sdk.models.mamba2_block.selective_scan") as scan,
    ):
        yield
    conv.assert_not_called()
    rule.assert_not_called()
    scan.assert_not_called()


def test_copied_states_go_on_alone() -> None:
    reference, _ = models("qwen3_5_text")
    exact = ours(reference, dtype=torch.float64)  # in float32, a product's last bits depend on the number of rows
    backend = backend_of(exact)
    step(exact, backend, [(PROMPT[:70], 0, 0)])
    backend.copy([(0, 1, 70), (0, 2, 70)])
    backend.copy_states([(0, 1), (0, 2)])
    step(exact, backend, [([9, 8, 7], 70, 0), ([5], 70, 2)])  # other texts from here on
    (own,) = step(exact, backend, [(PROMPT[70:], 70, 1)])
    (expected,) = step(exact, backend_of(exact), [(PROMPT, 0, 0)])
    torch.testing.assert_close(own, expected[70:], rtol=0, atol=1e-5)  # logits are float32


@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_a_copied_state_goes_through_the_drafts_that_were_right(num_right: int) -> None:
    reference, _ = models("qwen3_5_text")
    exact = ours(reference, dtype=torch.float64)
    backend = backend_of(exact, num_drafts=3)
    step(exact, backend, [(PROMPT[:70], 0, 0)])
    drafts = [*PROMPT[71 : 71 + num_right], 9, 9, 9][:3]
    step(exact, backend, [([PROMPT[70], *drafts], 70, 0)], num_drafts=3)
    end = 71 + num_right
    backend.copy([(0, 1, end)])
    backend.copy_states([(0, 1)])
    step(exact, backend, [([5, 6], end, 0)])  # another text from here on
    (own,) = step(exact, backend, [(PROMPT[end:], end, 1)])
    (expected,) = step(exact, backend_of(exact), [(PROMPT, 0, 0)])
    torch.testing.assert_close(own, expected[end:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_weights_and_keys(family: str) -> None:
    """A part that is quantized wrongly, or not at all, shows in the median of all rows."""
    reference, model = models(family)
    (expected,) = step(model, backend_of(model), [(PROMPT, 0, 0)])
    quantized = ours(reference, policy=WeightPolicy(isq=IsqType.Q8_0))
    (own,) = step(quantized, backend_of(quantized), [(PROMPT, 0, 0)])
    assert 0 < _error(own, expected) < 0.15
    if model.config.attention_layers:
        (own,) = step(model, backend_of(model, PagedCacheType.F8E4M3), [(PROMPT, 0, 0)])
        assert 0 < _error(own, expected) < 0.15


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_keys_of_4_bits(family: str) -> None:
    """Their scales are of 32 elements, which heads here have."""
    wide = {"hidden_size": 128, "head_dim": 32, "mamba_d_head": "auto"}
    reference = reference_model(family, CONFIGS[family] | wide)
    model = ours(reference)
    (expected,) = step(model, backend_of(model), [(PROMPT, 0, 0)])
    backend = backend_of(model, PagedCacheType.Q4)
    (first,) = step(model, backend, [(PROMPT[:70], 0, 0)])
    (second,) = step(model, backend, [(PROMPT[70:], 70, 0)])
    assert 0 < _error(torch.cat([first, second]), expected) < 0.15


def _error(own: Tensor, expected: Tensor) -> float:
    """Return the median over rows of the relative squared error."""
    return float(((own - expected).square().mean(-1) / expected.square().mean(-1)).median())


def test_kv_is_kept_of_layers_with_attention_alone() -> None:
    _, model = models("lfm2")
    config = model.config
    assert config.attention_layers == [2]
    assert config.kv_elements_per_token == 2 * config.num_kv_heads * config.head_dim
    assert backend_of(model).state_bytes == 4 * 3 * 2 * 64 * 4  # slots, layers, kept inputs, channels, bytes


FUSED: Final[dict[str, dict[str, Any]]] = {
    **{name: config for name, config in NATIVE.items() if not name.startswith("falcon_h1")},
    **{
        name: CONFIGS[name]
        for name in (
            *("lfm2_moe", "granitemoehybrid with positions and biases", "granitemoehybrid with experts"),
            *("bamba", "nemotron_h with experts", "mamba2"),
        )
    },
    "qwen3_5_moe_text": _DELTA | _SHARED | {"linear_value_head_dim": 32},
}
"""Models whose layers run in one native call."""


def in_one_call(
    reference: PreTrainedModel, *, dtype: torch.dtype = torch.float32, num_threads: int = 1, isq: IsqType | None = None
) -> tuple[FusedDecoderModel, StatefulBackend]:
    own = workspace(num_threads=num_threads)
    model = ours(reference, dtype=dtype, policy=WeightPolicy(workspace=own, isq=isq))
    backend = backend_of(model, PagedCacheType.AUTO, own)
    fused = fuse(model, backend, BuildSettings(batch_invariance=True))
    assert isinstance(fused, FusedDecoderModel)
    return fused, backend


def in_chunks(model: CausalModel, backend: StatefulBackend, other: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logits of the prompt and of another one, which are computed in chunks beside each other in slots that
    hold NaN.
    """
    for states in backend._states.values():
        for state in states:
            state.fill_(torch.nan)
    parts, of_other = list[Tensor](), list[Tensor]()
    for (first, last), (begin, end) in zip(
        [(0, 40), (40, 41), (41, 42), (42, 150)], [(0, 2), (2, 70), (70, 71), (71, 90)], strict=True
    ):
        each, own = step(model, backend, [(other[begin:end], begin, 3), (PROMPT[first:last], first, 1)])
        of_other.append(each)
        parts.append(own)
    return torch.cat(parts), torch.cat(of_other)


@needs_library
@pytest.mark.parametrize("family", FUSED)
def test_layers_in_one_call_compute_the_same(family: str) -> None:
    """The judge is the model in float64, whose operations the tests above compare with transformers."""
    reference, other = reference_model(family, FUSED[family]), random_prompt(90, seed=3)
    exact = ours(reference, dtype=torch.float64)
    expected, alone = (step(exact, backend_of(exact), [(prompt, 0, 0)])[0] for prompt in (PROMPT, other))
    model, backend = in_one_call(reference)
    with unused_torch_layers():
        (whole,) = step(model, backend, [(PROMPT, 0, 1)])
        got, got_other = in_chunks(model, backend, other)
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(got, whole)
    assert (got_other - alone).abs().max() < 1e-4 * alone.abs().max()


@needs_library
@pytest.mark.parametrize("isq", [None, IsqType.Q8_0], ids=["bfloat16", "quantized"])
@pytest.mark.parametrize("family", FUSED)
def test_results_depend_on_no_neighbour_chunk_or_thread(family: str, isq: IsqType | None) -> None:
    """Bit for bit, in bfloat16, which the states of convolutions have too."""
    reference, other = reference_model(family, FUSED[family]), random_prompt(90, seed=3)
    model, backend = in_one_call(reference, dtype=torch.bfloat16, isq=isq)
    (whole,), (alone,) = (step(model, backend, [(prompt, 0, 0)]) for prompt in (PROMPT, other))
    threads, shared = in_one_call(reference, dtype=torch.bfloat16, isq=isq, num_threads=3)
    got, got_other = in_chunks(threads, shared, other)
    assert torch.equal(got, whole)
    assert torch.equal(got_other, alone)


@needs_library
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        *((name, "no recurrent layers beside attention") for name in CONFIGS if name.startswith("falcon_h1")),
        ("qwen3_5_text", "its recurrent layers have no native kernel"),  # values of 8 numbers
        ("nemotron_h with experts of latent vectors", "does not know latent_size = 32"),
    ],
)
def test_why_layers_are_not_fused(family: str, reason: str) -> None:
    own = workspace()
    model = ours(models(family)[0], policy=WeightPolicy(workspace=own))
    backend = backend_of(model, PagedCacheType.AUTO, own)
    assert reason in (why_not_fused(model, backend) or "")
    with pytest.raises(ConfigError, match=f"with_batch_invariance = True .*{reason}"):
        fuse(model, backend, BuildSettings(batch_invariance=True))


@pytest.mark.parametrize(
    ("family", "change", "error", "message"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}, CheckpointError, "full_attention once"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, CheckpointError, "each of 4 layers"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, CheckpointError, "linear_attention for each of 4"),
        ("qwen3_next", {"linear_num_value_heads": 3}, CheckpointError, "a multiple of linear_num_key_heads = 2"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, CheckpointError, "expected silu"),
        ("qwen3_5_text", {"rope_parameters": {"mrope_section": [1, 1]}}, CheckpointError, "three .* add up to 2"),
        ("qwen3_5_text", {"rope_parameters": {"mrope_section": [3, 2, -3]}}, CheckpointError, "three .* add up to 2"),
        ("lfm2_moe", {"n_group": 2}, UnsupportedArchitectureError, "n_group = 2"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, CheckpointError, "full_attention once"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, CheckpointError, "each of 4 layers"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "moe", "mamba"]}, CheckpointError, "each of 4"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, CheckpointError, "expected silu"),
        ("granitemoehybrid", {"time_step_limit": [0.001, 0.1]}, CheckpointError, "expected 0 and Infinity"),
        ("granitemoehybrid", {"time_step_limit": 3}, CheckpointError, "expected 0 and Infinity"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, CheckpointError, "a divisor of the width 128"),
        ("granitemoehybrid", {"mamba_d_head": 32}, CheckpointError, "expected 16, the width 128 divided by"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, CheckpointError, "a divisor of mamba_n_heads = 8"),
        ("bamba", {"attn_layer_indices": [4]}, CheckpointError, "one of the 4 layers"),
        ("bamba", {"hidden_act": "relu"}, CheckpointError, "expected silu"),
        ("falcon_h1", {"hidden_act": "relu"}, CheckpointError, "expected silu"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, CheckpointError, "expected 5 numbers"),
        ("mamba2", {"num_heads": 4}, CheckpointError, "expected 8: expand times hidden_size is 128, of 16 each"),
        ("mamba2", {"n_groups": 3}, CheckpointError, "a divisor of num_heads = 8"),
        ("mamba2", {"hidden_act": "gelu"}, CheckpointError, "expected silu"),
        ("mamba2", {"time_step_limit": [0.01, 0.1]}, CheckpointError, "expected 0 and Infinity"),
        ("nemotron_h with experts", {"mlp_hidden_act": "relu"}, CheckpointError, "silu or .* in layers with experts"),
        ("nemotron_h with experts", {"num_experts_per_tok": 5}, CheckpointError, "at most the number of experts, 4"),
        ("nemotron_h with experts", {"n_group": 3}, CheckpointError, "groups of 4 experts"),
        ("nemotron_h with experts", {"moe_latent_size": 0}, CheckpointError, "moe_latent_size"),
        ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, CheckpointError, "full_attention once"),
        ("nemotron_h", {"hybrid_override_pattern": "MX*"}, CheckpointError, "letters among"),
        ("nemotron_h", {"n_groups": 3}, CheckpointError, "a divisor of mamba_num_heads = 8"),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, CheckpointError, "expected silu"),
        ("nemotron_h", {"attention_bias": True}, CheckpointError, "neither biases nor windows"),
    ],
)
def test_what_a_config_may_not_say(family: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_config(_COMMON | {"model_type": family} | CONFIGS[family] | change)


@pytest.mark.parametrize("sections", [None, [20, 4, 8]])
def test_positions_in_time_height_and_width(sections: list[int] | None) -> None:
    """In a part of each head, as many frequencies each as the released models have, or as the config says."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config: Any = Qwen3_5TextConfig(rope_parameters=rope if sections is None else rope | {"mrope_section": sections})
    positions = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    reference: Any = Qwen3_5TextRotaryEmbedding(config)
    cosines, sines = reference(torch.empty(0), positions[:, None])
    shape = read_config(config.to_dict())
    own = RotaryEmbedding(shape.ropes[shape.attention_layers[0]], device=CPU).at(positions)
    torch.testing.assert_close(own.cosines, cosines[0, :, :32], rtol=0, atol=1e-4)
    torch.testing.assert_close(own.sines, sines[0, :, :32], rtol=0, atol=1e-4)


def test_sizes_of_published_configs() -> None:
    """LFM2's first checkpoints have other names of fields than transformers writes."""
    shape: DecoderConfig = read_config(
        {
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "vocab_size": 65536,
            "hidden_size": 1024,
            "block_ff_dim": 6656,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "tie_embedding": True,
        }
    )
    assert shape.intermediate_size == 4608
    assert shape.attention_layers == [2, 5, 8, 10, 12, 14]
    assert shape.tie_embeddings
    assert shape.ropes[0].theta == 1e6


def test_nested_text_decoder() -> None:
    """Qwen 3.5's checkpoints have an image encoder beside the decoder."""
    reference, model = models("qwen3_5_text")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in reference.state_dict().items()
    }
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": reference.config.to_dict(),
        "tie_word_embeddings": False,
    }
    nested = load_model(config, DictSource(tensors), dtype=torch.float32, placement=CPU)
    (own,) = step(nested, backend_of(nested), [(PROMPT, 0, 0)])
    (expected,) = step(model, backend_of(model), [(PROMPT, 0, 0)])
    assert torch.equal(own, expected)
    assert plan_model(config, torch.float32, images=True).config.recurrent_layers
