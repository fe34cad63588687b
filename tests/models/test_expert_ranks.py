"""Ranks that share memory compute mixtures of experts to the last bit as one process does, whatever computes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import frozen
from odd_configs import FAMILIES, reference_of
from reference_decoding import CPU, DictSource, logits
from test_family_shards import help_with, usual
from torch import Tensor

from native_weights import library, needs_library
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import make_shared_memory
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.models.sharded import ColumnParallelExperts, RowParallelExperts, SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.policy import WeightPolicy
from rank_threads import run_ranks

pytestmark = needs_library

# Five times 32 neurons and four times 32 outputs, which three ranks cannot divide evenly, nor two the neurons.
SHAPE: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 16}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "qwen2_moe": {"moe_intermediate_size": 160, "shared_expert_intermediate_size": 160},
    "qwen3_moe": {"moe_intermediate_size": 160},
    "glm4_moe": {"moe_intermediate_size": 160},
    "afmoe": {"moe_intermediate_size": 160},
    "granitemoeshared": {"shared_intermediate_size": 160},
}
PROMPT: Final = [3, 17, 8, 90, 41, 41, 5, 22, 63, 12, 3, 8, 77, 30, 2, 9]


@frozen(kw_only=True)
class Form:
    """Says what computes the experts.

    :ivar is_native: whether native kernels do, rather than torch
    """

    dtype: torch.dtype = torch.float32
    isq: IsqType | None = None
    is_native: bool = True


FORMS: Final = {
    "float32": Form(),
    "bfloat16": Form(dtype=torch.bfloat16),
    "Q8_0": Form(isq=IsqType.Q8_0),
    "Q4_1": Form(isq=IsqType.Q4_1),
    "NF4": Form(isq=IsqType.NF4),
    "HQQ4": Form(isq=IsqType.HQQ4),
    "torch": Form(is_native=False),
}
# Each is one native call. GPT-OSS has biases and clamped factors; Qwen2, GLM and Granite have experts for all tokens,
# and Phi's experts are weighed apart.
MIXTURES: Final = ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "phimoe", "glm4_moe", "granitemoeshared", "afmoe")
SHORT: Final = (
    *(("mixtral", "Q8_0"), ("mixtral", "bfloat16"), ("gpt_oss", "Q8_0"), ("gpt_oss", "torch")),
    *(("qwen2_moe", "Q8_0"), ("phimoe", "torch"), ("glm4_moe", "bfloat16"), ("afmoe", "Q8_0")),
)


def model_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], form: Form, group: Group | None) -> DecoderModel:
    workspace = Workspace(library(), num_threads=1) if form.is_native else None
    policy = WeightPolicy(isq=form.isq, workspace=workspace)
    return load_model(config, DictSource(tensors), dtype=form.dtype, placement=CPU, policy=policy, group=group)


def said(model: DecoderModel, form: Form) -> Tensor:
    """Return the logits of a prompt in two chunks, and of one more token."""
    settings = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
    backend: AttentionBackend = PagedBackend(model.config, settings, 4)
    computes: DecoderModel | FusedDecoderModel = model
    if form.is_native:
        backend = NativePagedBackend(model.config, settings, 4, workspace=Workspace(library(), num_threads=1))
        assert why_not_fused(model, backend) is None
        computes = FusedDecoderModel(model, backend)
    if model.group is not None and model.group.rank:
        head, group = model.head, model.group
        assert isinstance(head, SharedHead)
        computes.logits = lambda hidden, adapted=None: help_with(head, group)  # type: ignore[method-assign]
    parts = [(PROMPT[:7], 0, [2, 1, 3]), (PROMPT[7:], 7, [2, 1, 3]), ([5], len(PROMPT), [2, 1, 3])]
    return torch.cat([logits(computes, backend, [part], num_prompt_tokens={0: len(PROMPT)})[0] for part in parts])


def experts_of(model: DecoderModel) -> list[object]:
    return [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeMlp)]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if (family, name) in SHORT else pytest.mark.long)
        for family in MIXTURES
        for name in FORMS
    ],
)
def test_the_same_bits(family: str, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    reference = reference_of(usual(family) | SHAPE | FAMILIES[family][0] | SIZES.get(family, {}), tmp_path)
    config, tensors = reference.config.to_dict(), reference.state_dict()
    for key in [key for key in tensors if "bias" in key]:  # which are zero at first
        tensors[key] = torch.randn(tensors[key].shape, generator=torch.Generator().manual_seed(len(key)))
    one = model_of(config, tensors, form, None)
    whole = said(one, form)
    for size in (2, 3, 4):
        file = make_shared_memory(library(), size)
        assert file is not None

        def run(group: Group, file: int = file) -> Tensor:
            group.share(library(), file)
            model = model_of(config, tensors, form, group)
            experts = experts_of(model)
            assert experts
            assert all(isinstance(each, ColumnParallelExperts) for each in experts)
            bases = [isinstance(each.base, DenseExperts) for each in experts if isinstance(each, ColumnParallelExperts)]
            assert any(bases) != form.is_native
            return said(model, form)

        parts = run_ranks(size, run)[0]
        os.close(file)
        if form.is_native:
            assert torch.equal(parts, whole), size
        else:  # torch may multiply fewer rows of a matrix in another order
            assert (parts - whole).abs().max() < 1e-5 * whole.abs().max(), size


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_what_cannot_be_joined_is_added_up(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside shared experts, whose columns can be joined."""
    sizes = SHAPE | FAMILIES[family][0] | SIZES.get(family, {}) | {"hidden_size": 64}
    reference = reference_of(usual(family) | sizes, tmp_path)
    config, tensors = reference.config.to_dict(), reference.state_dict()
    form = FORMS["float32"]
    whole = said(model_of(config, tensors, form, None), form)
    file = make_shared_memory(library(), 3)
    assert file is not None

    def run(group: Group) -> Tensor:
        group.share(library(), file)
        model = model_of(config, tensors, form, group)
        assert all(isinstance(each, RowParallelExperts) for each in experts_of(model))
        return said(model, form)

    with caplog.at_level("INFO", "paged_sdk"):
        parts = run_ranks(3, run)[0]
    os.close(file)
    assert "160 neurons and 64 outputs cannot be divided among 3 ranks by 32" in caplog.text
    assert (parts - whole).abs().max() < 1e-5 * whole.abs().max()
