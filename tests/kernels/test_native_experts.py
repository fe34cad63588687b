"""Native experts against each token and expert on its own in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from naive_moe import ACTIVATIONS
from torch import Tensor

from native_weights import (
    every_level,
    every_type,
    library,
    needs_library,
    quantize_activations,
    random_weight,
    workspace,
)
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.packed import DENSE_TYPES, pack_dense

pytestmark = needs_library

NUM_EXPERTS, NUM_SELECTED, INNER, HIDDEN = 6, 3, 256, 512
Q8_0, Q4_K, Q6_K = 8, 12, 14

#: Inner activations are rounded to codes: where one lies in the middle of two, float32 may take the other.
TOLERANCE = 1e-3


class Case:
    """Holds random experts.

    :ivar weights: gate (of three types), up and down in float64, ``[num_experts, rows, cols]``
    """

    def __init__(
        self,
        *tensor_types: int,
        isa: str | None = None,
        num_threads: int = 1,
        inner: int = INNER,
        activation: KernelActivation = "silu",
    ) -> None:
        self.activation = activation
        self.generator = torch.Generator().manual_seed(sum(tensor_types))
        shapes = ((inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))[-len(tensor_types) :]
        stacks = [
            random_weight(tensor_type, NUM_EXPERTS * rows, cols, self.generator)
            for tensor_type, (rows, cols) in zip(tensor_types, shapes, strict=True)
        ]
        self.packed = [packed for packed, _ in stacks]
        self.weights = [values.view(NUM_EXPERTS, -1, values.shape[1]) for _, values in stacks]
        *gates, up, down = self.packed
        self.experts = NativeExperts(
            workspace(isa, num_threads),
            gates[0] if gates else None,
            up,
            down,
            num_experts=NUM_EXPERTS,
            activation=activation,
        )

    def tokens(self, num_tokens: int, *, num_experts: int = NUM_EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, and the weights and numbers of their experts."""
        shape = (num_tokens, NUM_SELECTED)
        ids = torch.rand(num_tokens, num_experts, generator=self.generator).argsort(-1)[:, :NUM_SELECTED]
        return (
            torch.randn(num_tokens, HIDDEN, generator=self.generator),
            torch.rand(shape, generator=self.generator),
            ids,
        )

    def expected(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        rows = quantize_activations(x)
        for token, (weights, ids) in enumerate(zip(topk_weights.double(), topk_ids.tolist(), strict=True)):
            for weight, expert in zip(weights, ids, strict=True):
                first, *others, down = (stack[expert] for stack in self.weights)
                inner = ACTIVATIONS[self.activation](first @ rows[token])
                for up in others:
                    inner = inner * (up @ rows[token])
                out[token] += weight * (down @ quantize_activations(inner[None])[0])
        return out


def assert_near(result: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert (result.double() - expected).norm() < tolerance * expected.norm()


@every_level
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_each_token_gets_its_experts(isa: str, num_tokens: int) -> None:
    case = Case(Q4_K, Q4_K, Q6_K, isa=isa)
    tokens = case.tokens(num_tokens)
    assert_near(case.experts(*tokens), case.expected(*tokens))


@every_level
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize(("types", "activation"), [((Q8_0, Q8_0, Q8_0), "gelu_tanh"), ((Q4_K, Q8_0), "relu2")], ids=str)
def test_every_activation_with_gates_and_without(
    isa: str, num_tokens: int, types: tuple[int, ...], activation: KernelActivation
) -> None:
    """As the experts of Gemma 4 and of Nemotron-H have them."""
    case = Case(*types, isa=isa, activation=activation)
    tokens = case.tokens(num_tokens)
    assert_near(case.experts(*tokens), case.expected(*tokens))


@every_type
def test_every_type(tensor_type: int) -> None:
    """In any place, and beside others."""
    for types in ((tensor_type, Q8_0, Q4_K), (Q8_0, tensor_type, Q6_K), (Q4_K, Q8_0, tensor_type)):
        case = Case(*types)
        tokens = case.tokens(3)
        assert_near(case.experts(*tokens), case.expected(*tokens))


@pytest.mark.parametrize("inner", [32, 96, 160])
def test_any_inner_size_of_whole_groups(inner: int) -> None:
    case = Case(Q4_K, Q4_K, Q8_0, inner=inner, num_threads=2)
    tokens = case.tokens(4)
    assert_near(case.experts(*tokens), case.expected(*tokens))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_a_token_depends_on_no_other_and_on_no_thread(num_tokens: int, num_threads: int) -> None:
    """Of 200 tokens, experts have several segments."""
    x, weights, ids = Case(Q4_K, Q4_K, Q6_K).tokens(num_tokens)
    alone = Case(Q4_K, Q4_K, Q6_K).experts
    one_by_one = torch.cat([alone(*(each[i : i + 1] for each in (x, weights, ids))) for i in range(num_tokens)])
    assert torch.equal(Case(Q4_K, Q4_K, Q6_K, num_threads=num_threads).experts(x, weights, ids), one_by_one)


def test_one_expert_of_all_tokens() -> None:
    case = Case(Q8_0, Q8_0, Q8_0, num_threads=2)
    x, weights, _ = case.tokens(70)
    tokens = (x, weights, torch.full((70, NUM_SELECTED), 4))  # which counts as often as it is named
    assert_near(case.experts(*tokens), case.expected(*tokens))


def test_bfloat16_and_rows_apart() -> None:
    case = Case(Q8_0, Q8_0, Q8_0)
    x, weights, ids = case.tokens(6)
    rows = torch.zeros(6, HIDDEN + 8, dtype=torch.bfloat16)
    rows[:, :HIDDEN] = x
    result = case.experts(rows[:, :HIDDEN], weights, ids)
    assert result.dtype is torch.bfloat16
    assert_near(result, case.expected(x.bfloat16(), weights, ids), 4e-3)


def test_no_tokens() -> None:
    assert Case(Q8_0, Q8_0, Q8_0).experts(*Case(Q8_0, Q8_0, Q8_0).tokens(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_alone(bad: float) -> None:
    case = Case(Q4_K, Q4_K, Q6_K)
    x, weights, ids = case.tokens(5)
    good = case.experts(x, weights, ids)
    x[2, 100] = bad
    result = case.experts(x, weights, ids)
    assert result[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(result[others], good[others])


def test_bytes_are_the_files() -> None:
    case = Case(Q4_K, Q4_K, Q6_K)
    weights = NUM_EXPERTS * INNER * HIDDEN
    assert case.experts.num_bytes == weights * (144 + 144 + 210) // 256


def test_an_expert_that_is_not_there() -> None:
    case = Case(Q8_0, Q8_0, Q8_0)
    x, weights, ids = case.tokens(2)
    for wrong in (-1, NUM_EXPERTS):
        ids[1, 1] = wrong
        with pytest.raises(ConfigError, match=f"topk_ids .* expected experts 0 to {NUM_EXPERTS - 1}"):
            case.experts(x, weights, ids)


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    case = Case(Q8_0, Q8_0, Q8_0)
    x, weights, ids = case.tokens(2)
    for name, arguments in {
        "x": (x[:, 1:], weights, ids),
        "topk_weights": (x, weights.double(), ids),
        "topk_ids": (x, weights, ids.int()),
    }.items():
        with pytest.raises(ConfigError, match=name):
            case.experts(*arguments)
    gate, up, down = case.packed
    for weights_of_wrong_shape in ((gate, down, up), (down, up, gate)):
        with pytest.raises(ConfigError, match="rows"):
            NativeExperts(workspace(), *weights_of_wrong_shape, num_experts=NUM_EXPERTS)
    with pytest.raises(ConfigError, match="multiplied as they are"):
        NativeExperts(workspace(), gate.hadamard_form(), up, down, num_experts=NUM_EXPERTS)


@every_level
@pytest.mark.parametrize("dtype", list(DENSE_TYPES), ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_dense_experts(isa: str, dtype: torch.dtype, num_threads: int) -> None:
    """The same for a token among others as for one alone; 70 tokens of one expert make two segments."""
    generator = torch.Generator().manual_seed(3)
    inner, hidden = 96, 160
    gate, up, down = (
        torch.randn(NUM_EXPERTS, *shape, generator=generator).to(dtype)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    packed = [
        pack_dense(library(), stack, (NUM_EXPERTS * stack.shape[1], stack.shape[2]), dtype)
        for stack in (gate, up, down)
    ]
    experts = NativeExperts(workspace(isa, num_threads), *packed, num_experts=NUM_EXPERTS)
    x = torch.randn(70, hidden, generator=generator)
    weights = torch.rand(70, NUM_SELECTED, generator=generator)
    ids = torch.rand(70, NUM_EXPERTS, generator=generator).argsort(-1)[:, :NUM_SELECTED]
    ids[:, 0], ids[:, 1:] = 5, ids[:, 1:] % 5
    got = experts(x, weights, ids)

    def as_multiplied(rows: Tensor) -> Tensor:
        return (rows.bfloat16() if dtype == torch.bfloat16 else rows).double()

    rows = as_multiplied(x)
    chosen = [stack.double()[ids] for stack in (gate, up, down)]  # [tokens, selected, ...]
    of_gate, of_up = (torch.einsum("tsih,th->tsi", stack, rows) for stack in chosen[:2])
    of_down = torch.einsum("tshi,tsi->tsh", chosen[2], as_multiplied(F.silu(of_gate) * of_up))
    # A number that falls on the other side of a bfloat16 step.
    assert_near(got, torch.einsum("tsh,ts->th", of_down, weights.double()), 1e-3 if dtype == torch.bfloat16 else 1e-5)
    for token in (0, 31, 69):
        one = slice(token, token + 1)
        assert torch.equal(experts(x[one], weights[one], ids[one]), got[one])


def test_dense_experts_beside_others_are_refused() -> None:
    case, weight = Case(Q8_0, Q8_0, Q8_0), torch.randn(NUM_EXPERTS * INNER, HIDDEN)
    dense = pack_dense(library(), [weight], (NUM_EXPERTS * INNER, HIDDEN), torch.float32)
    with pytest.raises(ConfigError, match="up"):
        NativeExperts(workspace(), case.packed[0], dense, case.packed[2], num_experts=NUM_EXPERTS)
