"""A checkpoint format of one's own, through the public seams alone: a source of weights and its kind of stored matrix.

Rows of 4-bit integers with one scale each: no form of weight knows them, so they are decoded where they are needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from attrs import frozen
from reference_decoding import CPU, DictSource, greedy, paged, random_prompt
from torch import Tensor

from native_weights import needs_library, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix, bounds
from paged_sdk.models.loading import load_model
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.embedding import DenseEmbedding
from paged_sdk.quant.form import Form, Place
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear
from paged_sdk.quant.native_dense import NativeDenseLinear
from paged_sdk.quant.policy import WeightPolicy
from tiny import build_model


@pytest.mark.thinned("keep", "family", of=1)
@frozen(eq=False)
class Int4Rows:
    """A matrix of 4-bit integers, one scale per row.

    :ivar codes: uint8 ``[rows, columns / 2]``: of two columns, the first in the low half
    :ivar scales: float32 ``[rows]``
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int4Rows:
        scales = weight.float().abs().amax(1).clamp_min(1e-8) / 7
        codes = (weight.float() / scales[:, None]).round().to(torch.int8) + 8
        return cls((codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.uint8), scales)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 2

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_dense(self) -> bool:
        return False

    def rows(self, index: slice) -> Int4Rows:
        return Int4Rows(self.codes[index], self.scales[index])

    def cols(self, index: slice) -> Int4Rows:
        first, last = bounds(index, self.shape[1])
        if first % 2 or last % 2:
            raise UnsupportedQuantizationError(f"columns {first} to {last} cut a block of 2 elements")
        return Int4Rows(self.codes[:, first // 2 : last // 2], self.scales)

    def to(self, device: torch.device) -> Int4Rows:
        return Int4Rows(self.codes.to(device), self.scales.to(device))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten(1)
        return ((codes.float() - 8) * self.scales[:, None]).to(dtype)


class Int4Source:
    """A model whose every matrix is stored in 4 bits, a :class:`~paged_sdk.weights.source.WeightSource`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._vectors = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 1}
        self._matrices = {name: Int4Rows.of(each.flatten(0, -2)) for name, each in tensors.items() if each.dim() > 1}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(f"there is no tensor {name!r}")
        return self._shapes[name]

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        values = self._matrices[name].decoded() if name in self._matrices else self._vectors[name]
        return values.to(device, dtype).view(self._shapes[name])

    def matrix(self, name: str) -> StoredMatrix:
        return self._matrices[name]

    def close(self) -> None:
        """Nothing is open."""

    def decoded(self) -> DictSource:
        """Return the same checkpoint in float32."""
        return DictSource({name: self.tensor(name, torch.float32, CPU) for name in self.names()})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2", "qwen3_moe"])
def test_its_tokens_are_those_of_its_decoded_weights(family: str, *, keep: bool) -> None:
    reference: Any = build_model(family)
    config, source = reference.config.to_dict(), Int4Source(reference.state_dict())
    prompt = random_prompt(30)
    policy = WeightPolicy(keep_blocks=keep)
    model = load_model(config, source, dtype=torch.float32, placement=CPU, policy=policy)
    dense = load_model(config, source.decoded(), dtype=torch.float32, placement=CPU)
    assert isinstance(model.embedding, DenseEmbedding)
    assert isinstance(model.head, DenseLinear)
    assert greedy(model, paged(16), prompt, 8) == greedy(dense, paged(16), prompt, 8)


def test_parts_are_those_of_the_decoded_matrix() -> None:
    matrix = Int4Rows.of(torch.randn(6, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(matrix.rows(slice(2, 5)).decoded(), matrix.decoded()[2:5])
    assert torch.equal(matrix.cols(slice(8, 20)).decoded(), matrix.decoded()[:, 8:20])
    with pytest.raises(UnsupportedQuantizationError, match="cut a block of 2 elements"):
        matrix.cols(slice(1, 4))


@needs_library
def test_it_can_be_quantized_in_situ_by_name() -> None:
    """What a pattern names is what the policy quantizes, and nothing else."""
    reference: Any = build_model("llama")
    source = Int4Source(reference.state_dict())
    rules = [(re.compile(r"layers\.1\..*down_proj"), None), (re.compile(r"mlp\.|lm_head"), IsqType.Q8_0)]
    policy = WeightPolicy(workspace=workspace(), isq_by_name=rules)
    model = load_model(reference.config.to_dict(), source, dtype=torch.float32, placement=CPU, policy=policy)
    first, second = (layer.linears for layer in model.layers)
    assert [type(linear) for linear in first] == [
        NativeDenseLinear,
        NativeDenseLinear,
        NativeBlockLinear,
        NativeBlockLinear,
    ]
    assert [type(linear) for linear in second] == [
        NativeDenseLinear,
        NativeDenseLinear,
        NativeBlockLinear,
        NativeDenseLinear,
    ]
    assert isinstance(model.head, NativeBlockLinear)


class Int4Linear(DenseLinear):
    """Stands for a kernel of the format's own."""


class Int4Form(Form):
    """A form of weight of one's own."""

    def linear(self, matrices: Any, biases: Any, place: Place, *, is_head: bool) -> Linear | None:
        if not all(isinstance(matrix, Int4Rows) for matrix in matrices) or is_head:
            return None
        bias = None if biases[0] is None else torch.cat(biases)
        return Int4Linear(torch.cat([place.decoded(matrix) for matrix in matrices]), bias)


def test_a_form_of_its_own_serves_it() -> None:
    reference: Any = build_model("qwen3_moe")
    config, source = reference.config.to_dict(), Int4Source(reference.state_dict())
    policy = WeightPolicy(keep_blocks=True, forms=[Int4Form()])
    model = load_model(config, source, dtype=torch.float32, placement=CPU, policy=policy)
    assert all(type(linear) is Int4Linear for layer in model.layers for linear in layer.linears)
    assert type(model.head) is DenseLinear
    prompt = random_prompt(30)
    dense = load_model(config, source.decoded(), dtype=torch.float32, placement=CPU)
    assert greedy(model, paged(16), prompt, 8) == greedy(dense, paged(16), prompt, 8)
