"""The Triton kernels of experts in blocks against each token and expert on its own in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from naive_moe import MoeInputs, naive_moe
from torch import Tensor

from native_weights import TRITON_TYPES, random_matrix
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix

pytest.importorskip("triton")

NUM_EXPERTS, NUM_SELECTED = 4, 2
Q5_0, Q8_0, Q4_K, Q5_K, Q6_K = 6, 8, 12, 13, 14

#: Norm of the difference over the norm of the result. Of halves, weights and inner activations are rounded.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_type = pytest.mark.parametrize("tensor_type", TRITON_TYPES, ids=lambda number: BLOCK_FORMATS[number].name)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def choices(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of each token's experts."""
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator()).argsort(-1)[:, :NUM_SELECTED]
    return torch.rand(num_tokens, NUM_SELECTED, generator=generator()), ids.contiguous()


def stack(tensor_type: int, rows: int, cols: int, seed: int = 0) -> BlockMatrix:
    """Put as many rows of each expert one below the other."""
    return random_matrix(tensor_type, NUM_EXPERTS * rows, cols, torch.Generator().manual_seed(seed))


def by_expert(blocks: BlockMatrix) -> Tensor:
    """Return float64 ``[num_experts, rows, cols]``."""
    return blocks.decoded().double().view(NUM_EXPERTS, -1, blocks.shape[1])


def assert_near(result: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert result.dtype is dtype
    assert (result.cpu().double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


class Experts:
    """Holds random experts.

    :ivar matrices: gate (of three types), up and down of all experts, repacked
    """

    def __init__(
        self,
        *tensor_types: int,
        inner: int,
        hidden: int,
        device: torch.device,
        activation: KernelActivation = "silu",
    ) -> None:
        self.activation = activation
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))[-len(tensor_types) :]
        self.blocks = [stack(each, *shape, i) for i, (each, shape) in enumerate(zip(tensor_types, shapes, strict=True))]
        self.matrices: list[TritonBlockMatrix] = [repack(each).to(device) for each in self.blocks]
        self.hidden, self.device = hidden, device

    def inputs(self, num_tokens: int, dtype: torch.dtype = torch.float32) -> MoeInputs:
        *firsts, down = (by_expert(each) for each in self.blocks)
        # Small: the interpreter's exp warns of saturated gates.
        x = (torch.randn(num_tokens, self.hidden, generator=generator()) * 0.01).to(dtype)
        return MoeInputs(x, torch.cat(firsts, dim=1), down, *choices(num_tokens))

    def run(self, inputs: MoeInputs) -> Tensor:
        from paged_sdk.kernels.triton.quantized_experts import quantized_experts

        x, weights, ids = (each.to(self.device) for each in (inputs.hidden, inputs.topk_weights, inputs.topk_ids))
        *gates, up, down = self.matrices
        gate = gates[0] if gates else None
        return quantized_experts(x, gate, up, down, weights, ids, num_experts=NUM_EXPERTS, activation=self.activation)

    def run_by_tiles(self, inputs: MoeInputs, block_m: int = 16, *, deep: bool = False) -> Tensor:
        from paged_sdk.kernels.triton.quantized_expert_tiles import experts_by_tiles
        from paged_sdk.kernels.triton.tile_choices import TileChoice

        choice = TileChoice(block_m=block_m, block_n=64, block_w=32, num_warps=4, num_stages=2, deep=deep)
        *gates, up, down = self.matrices
        gate = gates[0] if gates else None
        x, weights, ids = (each.to(self.device) for each in (inputs.hidden, inputs.topk_weights, inputs.topk_ids))
        return experts_by_tiles(
            x, gate, up, down, weights, ids, choice, num_experts=NUM_EXPERTS, activation=self.activation
        )


@pytest.mark.thinned("types", "dtype", of=1)
@every_dtype
@pytest.mark.parametrize("types", [*((each, each) for each in TRITON_TYPES), (Q4_K, Q8_0), (Q8_0, Q5_K)], ids=str)
def test_gate_and_up_of_pairs(triton_device: torch.device, types: tuple[int, int], dtype: torch.dtype) -> None:
    """Of each expert three rows, which do not fill the last program."""
    from paged_sdk.kernels.triton.quantized_expert_pairs import gate_up_of_pairs

    gate, up = (stack(each, 3, 256, i) for i, each in enumerate(types))
    x = (torch.randn(2, 256, generator=generator()) * 0.01).to(dtype)
    weights, ids = choices(2)
    result = gate_up_of_pairs(
        x.to(triton_device),
        repack(gate).to(triton_device),
        repack(up).to(triton_device),
        weights.to(triton_device),
        ids.to(triton_device),
        num_experts=NUM_EXPERTS,
        activation="silu",
    )
    gates, ups = (torch.einsum("tknc,tc->tkn", by_expert(each)[ids], x.double()) for each in (gate, up))
    assert_near(result, (weights.double().unsqueeze(-1) * F.silu(gates) * ups).flatten(1), dtype)


@pytest.mark.thinned("dtype", "tensor_type", "num_tokens", of=1)
@every_dtype
@every_type
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_down_of_tokens(triton_device: torch.device, tensor_type: int, num_tokens: int, dtype: torch.dtype) -> None:
    from paged_sdk.kernels.triton.quantized_expert_pairs import down_of_tokens

    down = stack(tensor_type, 3, 256)
    x = torch.randn(num_tokens, NUM_SELECTED * 256, generator=generator()).to(dtype)
    _, ids = choices(num_tokens)
    matrix = repack(down).to(triton_device)
    result = down_of_tokens(x.to(triton_device), matrix, ids.to(triton_device), num_experts=NUM_EXPERTS)
    pairs = x.double().view(num_tokens, NUM_SELECTED, 256)
    assert_near(result, torch.einsum("tknc,tkc->tn", by_expert(down)[ids], pairs), dtype)


@pytest.mark.parametrize("cols", [32, 96, 352])
def test_down_of_rows_that_do_not_fill_a_chunk(triton_device: torch.device, cols: int) -> None:
    from paged_sdk.kernels.triton.quantized_expert_pairs import down_of_tokens

    down = stack(Q5_0, 3, cols)
    x = torch.randn(2, NUM_SELECTED * cols, generator=generator())
    _, ids = choices(2)
    matrix = repack(down).to(triton_device)
    result = down_of_tokens(x.to(triton_device), matrix, ids.to(triton_device), num_experts=NUM_EXPERTS)
    assert_near(result, torch.einsum("tknc,tkc->tn", by_expert(down)[ids], x.double().view(2, NUM_SELECTED, cols)))


@pytest.mark.thinned("types", "dtype", of=1)
@every_dtype
@pytest.mark.parametrize("types", [(Q4_K, Q4_K, Q6_K), (Q8_0, Q5_K, Q4_K), (Q4_K, Q8_0, Q5_0)], ids=str)
def test_tiles(triton_device: torch.device, types: tuple[int, int, int], dtype: torch.dtype) -> None:
    experts = Experts(*types, inner=256, hidden=256, device=triton_device)
    inputs = experts.inputs(3, dtype)
    assert_near(experts.run_by_tiles(inputs), naive_moe(inputs), dtype)


@every_type
def test_tiles_of_every_type(triton_device: torch.device, tensor_type: int) -> None:
    experts = Experts(tensor_type, tensor_type, tensor_type, inner=256, hidden=256, device=triton_device)
    inputs = experts.inputs(2)
    assert_near(experts.run_by_tiles(inputs), naive_moe(inputs))


@pytest.mark.parametrize(("inner", "hidden"), [(32, 64), (96, 160), (352, 32)])
def test_tiles_of_rows_that_do_not_fill_a_chunk(triton_device: torch.device, inner: int, hidden: int) -> None:
    experts = Experts(Q8_0, Q8_0, Q5_0, inner=inner, hidden=hidden, device=triton_device)
    inputs = experts.inputs(3)
    assert_near(experts.run_by_tiles(inputs), naive_moe(inputs))


@pytest.mark.parametrize(("block_m", "deep"), [(16, False), (32, True)])
def test_several_tiles_of_an_expert_and_none_of_another(triton_device: torch.device, block_m: int, deep: bool) -> None:
    experts = Experts(Q8_0, Q8_0, Q8_0, inner=32, hidden=64, device=triton_device)
    inputs = experts.inputs(50)
    inputs.topk_ids[:, 0], inputs.topk_ids[:, 1] = 2, torch.arange(50) % 2
    assert_near(experts.run_by_tiles(inputs, block_m, deep=deep), naive_moe(inputs))


def test_products_are_not_rounded_before_the_sum(triton_device: torch.device) -> None:
    """The same expert twice, with weights that differ by less than halves can tell of products."""
    experts = Experts(Q8_0, Q8_0, Q8_0, inner=32, hidden=64, device=triton_device)
    inputs = experts.inputs(20, torch.float16)
    inputs = inputs._replace(hidden=inputs.hidden * 100)
    ids, ones = inputs.topk_ids[:, :1], torch.ones_like(inputs.topk_weights[:, :1])
    whole = experts.run(inputs._replace(topk_ids=ids, topk_weights=ones)).double()
    weights = torch.cat((ones, ones * (-1 + 2**-12)), dim=1)
    result = experts.run(inputs._replace(topk_ids=ids.repeat(1, 2), topk_weights=weights)).double()
    torch.testing.assert_close(result, whole * 2**-12, rtol=0, atol=2**-20 * float(whole.abs().max()))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_an_expert_that_no_token_uses_is_not_read(triton_device: torch.device, num_tokens: int) -> None:
    """Of one token and of several, which take different ways."""
    experts = Experts(Q8_0, Q8_0, Q8_0, inner=32, hidden=32, device=triton_device)
    inputs = experts.inputs(num_tokens)
    inputs.topk_ids[:] %= 2
    for matrix in experts.matrices:
        matrix.scales[matrix.rows // 2 :] = -1  # two float16 NaN
    assert_near(experts.run(inputs), naive_moe(inputs))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_choices_may_be_int32_and_rows_apart(triton_device: torch.device, num_tokens: int) -> None:
    experts = Experts(Q8_0, Q8_0, Q8_0, inner=32, hidden=32, device=triton_device)
    inputs = experts.inputs(num_tokens)
    apart = inputs._replace(
        hidden=inputs.hidden.repeat_interleave(2, dim=0)[::2],
        topk_weights=inputs.topk_weights.repeat_interleave(2, dim=1)[:, ::2],
        topk_ids=inputs.topk_ids.int().repeat_interleave(2, dim=1)[:, ::2],
    )
    assert torch.equal(experts.run(apart), experts.run(inputs))


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize(("types", "activation"), [((Q8_0, Q5_0, Q8_0), "gelu_tanh"), ((Q5_0, Q8_0), "relu2")], ids=str)
def test_every_activation_with_gates_and_without(
    triton_device: torch.device, types: tuple[int, ...], activation: KernelActivation, num_tokens: int
) -> None:
    experts = Experts(*types, inner=32, hidden=64, device=triton_device, activation=activation)
    inputs = experts.inputs(num_tokens)
    assert_near(experts.run(inputs), naive_moe(inputs, activation))


def test_no_tokens(triton_device: torch.device) -> None:
    experts = Experts(Q8_0, Q8_0, Q8_0, inner=32, hidden=64, device=triton_device)
    assert experts.run(experts.inputs(0)).shape == (0, 64)
