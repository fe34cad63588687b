"""Whole models of grouped matrices: packed and fused, against their decoded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_decoding import CPU, DictSource, logits, paged, random_prompt
from torch import Tensor

from grouped_weights import quantized
from native_weights import needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.native.library import available_levels
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.quant.native_block import NativeBlockLinear, PackedBlockEmbedding
from paged_sdk.quant.native_block_experts import NativeBlockExperts
from paged_sdk.quant.policy import WeightPolicy
from tiny import build_model

pytestmark = needs_library

# Activations in int8, in both forms: of 2 or 3 layers, as of blocks (test_fused_decoder.py).
ERROR = 0.1


class GroupedSource(DictSource):
    """Gives every matrix as 4-bit codes; with ``act_order``, those of one width have their columns in one order, as
    GPTQ has them, but for experts.
    """

    def __init__(self, tensors: dict[str, Tensor], *, act_order: bool) -> None:
        super().__init__(tensors)
        self._act_order = act_order

    def matrix(self, name: str) -> StoredMatrix:
        weight = self._tensors[name].flatten(0, -2)
        order = None
        if self._act_order and "expert" not in name and "embed" not in name:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        return quantized(weight, order=order)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._tensors[name].dim() == 1 or "router" in name or "gate.weight" in name:
            return super().tensor(name, dtype, device)
        return self.matrix(name).decoded(dtype).view(self._tensors[name].shape).to(device)


def make_models(
    family: str, *, act_order: bool, one_form: bool = False, **options: Any
) -> tuple[DecoderModel, DecoderModel]:
    """Return a model whose matrices are packed, and one whose are decoded."""
    reference: Any = build_model(family, initializer_range=0.1, **options)
    config, source = reference.config.to_dict(), GroupedSource(reference.state_dict(), act_order=act_order)
    policies = WeightPolicy(keep_blocks=True, workspace=workspace(), one_form=one_form), WeightPolicy()
    packed, decoded = (
        load_model(config, source, dtype=torch.float32, placement=CPU, policy=policy) for policy in policies
    )
    assert isinstance(packed, DecoderModel)
    assert isinstance(decoded, DecoderModel)
    return packed, decoded


def whole(model: DecoderModel, text: list[int]) -> Tensor:
    return logits(model, paged(16)(model), [(text, 0, range(32))])[0]


def fused(model: DecoderModel, text: list[int], isa: str, *, generated: bool) -> Tensor:
    """Compute a prompt's logits, or those of tokens that count as generated, which few rows' form multiplies."""
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU, cache_type=PagedCacheType.AUTO)
    backend = NativePagedBackend(model.config, settings, 64, workspace=workspace(isa))
    assert why_not_fused(model, backend) is None
    made = FusedDecoderModel(model, backend)
    of_prompts = {0: 0} if generated else None
    return logits(made, backend, [(text, 0, range(32))], num_prompt_tokens=of_prompts)[0]


def relative(got: Tensor, expected: Tensor) -> float:
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    return float(errors.median())


@pytest.mark.thinned("act_order", "family", of=1)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "mixtral"])
def test_logits_are_those_of_the_decoded_weights(family: str, act_order: bool) -> None:
    options: dict[str, Any] = {"num_experts_per_tok": 4} if family == "mixtral" else {}
    model, decoded = make_models(family, act_order=act_order, **options)
    assert all(type(linear) is NativeBlockLinear for layer in model.layers for linear in layer.linears)
    assert type(model.head) is NativeBlockLinear
    assert type(model.embedding) is PackedBlockEmbedding
    text = random_prompt(40)
    expected = whole(decoded, text)
    assert relative(whole(model, text), expected) < ERROR
    for isa in {available_levels()[0], available_levels()[-1]}:
        for generated in (False, True):
            assert relative(fused(model, text, isa, generated=generated), expected) < ERROR


def test_experts_are_packed() -> None:
    model, _ = make_models("qwen3_moe", act_order=False)
    kinds = {type(experts) for layer in model.layers if (experts := getattr(layer.mlp, "experts", None)) is not None}
    assert kinds == {NativeBlockExperts}


def test_one_form_gives_a_row_the_same_bits_in_any_batch() -> None:
    model, _ = make_models("llama", act_order=True, one_form=True)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    for linear in (model.layers[0].attention.qkv, model.head):
        alone = torch.cat([linear.forward(row[None], None) for row in x])
        assert torch.equal(linear.forward(x, None), alone)
