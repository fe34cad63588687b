"""Layers with experts of the native decoder, against each token and expert on its own in float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from native_weights import every_level, library, needs_library, quantize_activations, random_weight, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native import mixture as described
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.packed import PackedWeight, pack_gguf
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.routing import ExpertChoice
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS

pytestmark = needs_library

HIDDEN, INNER, SIZE, BLOCK = 256, 96, 32, 8
Q4_0, Q8_0, Q4_K = 2, 8, 12

#: Activations are rounded to codes: where one lies in the middle of two, float32 may take the other.
TOLERANCE = 2e-3


def normed(rows: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(rows, (HIDDEN,), norm.to(rows.dtype), 1e-6)


def zeros(rows: int, cols: int) -> PackedWeight:
    raw = torch.zeros(rows, cols // 32 * BLOCK_FORMATS[Q4_0].num_bytes, dtype=torch.uint8)
    return pack_gguf(library(), raw, Q4_0, rows, cols, num_threads=1)


class Mixture:
    """Holds a layer of random experts, whose attention adds nothing.

    :ivar weights: gate, up and down in float64, ``[num_experts, rows, cols]``
    :ivar mlp: likewise of the MLP beside the experts; None: there is none
    """

    def __init__(
        self,
        num_experts: int = 40,
        num_selected: int = 3,
        *,
        renormalize: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.generator = torch.Generator().manual_seed(num_experts)
        self.norm = 1 + 0.1 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(num_experts))
        self.stacks, weights = self._drawn(num_experts, INNER)
        self.weights = [values.view(num_experts, -1, values.shape[1]) for values in weights]
        self.mlp: list[Tensor] | None = None
        router = torch.randn(num_experts, HIDDEN, generator=self.generator) / 8
        gate, up, down = self.stacks
        pages = torch.zeros(16, BLOCK, 1, SIZE)
        self.layer = DecoderLayer(
            shape=AttentionShape(1, 1, SIZE, scale=1.0),
            cache=LayerCache(pages, pages.clone()),
            qkv=(Projection(zeros(3 * SIZE, HIDDEN)),),
            output=Projection(zeros(HIDDEN, SIZE)),
            mixture=described.Mixture(
                router=router.to(dtype),
                choice=ExpertChoice(num_experts=num_experts, num_selected=num_selected, renormalize=renormalize),
                gate=gate,
                up=up,
                down=down,
            ),
            attention_norm=torch.ones(HIDDEN),
            mlp_norm=self.norm,
            norm_eps=1e-6,
        )

    def _drawn(self, count: int, inner: int) -> tuple[list[Projection], list[Tensor]]:
        """Draw gate, up and down of so many experts, packed and in float64."""
        stacks = [
            random_weight(tensor_type, count * rows, cols, self.generator)
            for tensor_type, rows, cols in ((Q4_K, inner, HIDDEN), (Q8_0, inner, HIDDEN), (Q8_0, HIDDEN, inner))
        ]
        return [Projection(packed) for packed, _ in stacks], [values for _, values in stacks]

    @property
    def description(self) -> described.Mixture:
        assert self.layer.mixture is not None
        return self.layer.mixture

    @property
    def router(self) -> Tensor:
        return self.description.router

    def change(self, **changes: Any) -> None:
        """Set fields of the experts' description."""
        self.layer = evolve(self.layer, mixture=evolve(self.description, **changes))

    def put_beside_mlp(self, *, gated: bool = True) -> None:
        """Give the layer an MLP, twice as wide as an expert."""
        (gate, up, down), self.mlp = self._drawn(1, 2 * INNER)
        self.layer = evolve(self.layer, gate=gate if gated else None, up=up, down=down)

    def rows(self, num_rows: int) -> Tensor:
        return torch.randn(num_rows, HIDDEN, generator=self.generator)

    def vector(self) -> Tensor:
        return 1 + 0.3 * torch.randn(HIDDEN, generator=self.generator)

    def chosen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each row's experts, and the rows as experts see them."""
        own, choice = self.description, self.description.choice
        norm = next(each for each in (own.router_norm, own.input_norm, self.norm) if each is not None)
        likelihoods = (normed(rows.double(), norm) @ self.router.double().T).softmax(-1)
        weights, ids = likelihoods.topk(choice.num_selected)
        return (weights / weights.sum(-1, keepdim=True) if choice.renormalize else weights), ids

    def expected(self, rows: Tensor) -> Tensor:
        own = self.description
        read = quantize_activations(normed(rows, self.norm if own.input_norm is None else own.input_norm))
        out = torch.zeros(rows.shape, dtype=torch.float64)
        for token, (weights, ids) in enumerate(zip(*self.chosen(rows), strict=True)):
            for weight, expert in zip(weights, ids.tolist(), strict=True):
                gate, up, down = (stack[expert] for stack in self.weights)
                inner = F.silu(gate @ read[token]) * (up @ read[token])
                out[token] += weight * (down @ quantize_activations(inner[None])[0])
        out = out if own.output_norm is None else normed(out, own.output_norm)
        return rows.double() + (out if self.mlp is None else out + self._of_mlp(rows, *self.mlp))

    def _of_mlp(self, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        own, read = self.description, quantize_activations(normed(rows, self.norm))
        scores = read @ up.T
        inner = F.silu(scores) if self.layer.gate is None else F.silu(read @ gate.T) * scores
        out = quantize_activations(inner) @ down.T
        if own.mlp_gate is not None:
            out = out * (normed(rows.double(), self.norm) @ own.mlp_gate.double()).sigmoid()[:, None]
        return out if own.dense_output_norm is None else normed(out, own.dense_output_norm)

    def spoil(self, experts: Iterable[int]) -> None:
        """Fill all experts with NaN."""
        for each in self.stacks:
            each.weight.data.view(len(self.router), -1)[list(experts)] = 255

    def run(self, rows: Tensor, *, isa: str | None = None, num_threads: int = 1) -> Tensor:
        """Run the layer; each row is the first token of a sequence of its own."""
        count = len(rows)
        batch = VarlenBatch(
            torch.arange(count + 1).int(), torch.arange(count).int()[:, None] % 16, torch.ones(count).int()
        )
        decoder = NativeDecoder(workspace(isa, num_threads), [self.layer])
        angles = torch.zeros(count, SIZE // 2)
        return decoder(rows.clone(), [(angles, angles)], torch.arange(count) * BLOCK % (16 * BLOCK), batch)


def assert_near(mixture: Mixture, rows: Tensor, got: Tensor) -> None:
    """Compare what experts add."""
    expected = mixture.expected(rows)
    assert (got.double() - expected).norm() < TOLERANCE * (expected - rows.double()).norm()


@every_level
@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_each_token_gets_its_experts(isa: str, num_rows: int) -> None:
    mixture = Mixture()
    rows = mixture.rows(num_rows)
    assert_near(mixture, rows, mixture.run(rows, isa=isa))


@every_level
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "num_selected"), [(1, 1), (4, 2), (5, 5), (16, 1), (17, 16)])
def test_every_number_of_experts(isa: str, num_experts: int, num_selected: int, *, renormalize: bool) -> None:
    mixture = Mixture(num_experts, num_selected, renormalize=renormalize)
    rows = mixture.rows(7)
    assert_near(mixture, rows, mixture.run(rows, isa=isa, num_threads=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_router_in_half_precision(dtype: torch.dtype) -> None:
    mixture = Mixture(dtype=dtype)
    rows = mixture.rows(7)
    assert_near(mixture, rows, mixture.run(rows))


def test_experts_may_read_what_no_norm_has_changed() -> None:
    """As in olmo2's layers, whose norms are of what is added to the residual stream."""
    mixture = Mixture(4, 2)
    rows = F.rms_norm(mixture.rows(7), (HIDDEN,), None, 1e-6)
    mixture.norm = torch.ones(HIDDEN)
    mixture.layer = evolve(mixture.layer, mlp_norm=None)
    assert_near(mixture, rows, mixture.run(rows))


@every_level
def test_likelihoods_far_apart(isa: str) -> None:
    """All but the likeliest few are 0 in float32: some take part with no weight."""
    mixture = Mixture(40, 6)
    mixture.router.mul_(1000)
    rows = mixture.rows(5)
    assert mixture.chosen(rows)[0].float().eq(0).any()
    assert_near(mixture, rows, mixture.run(rows, isa=isa))


def test_experts_that_nobody_chose_are_not_touched() -> None:
    mixture = Mixture()
    rows = mixture.rows(2)
    good = mixture.run(rows)
    mixture.spoil(set(range(40)) - set(mixture.chosen(rows)[1].flatten().tolist()))
    assert torch.equal(mixture.run(rows), good)


def test_of_experts_that_are_as_likely_torchs_are_taken() -> None:
    mixture = Mixture(20, 4)
    rows = mixture.rows(2)
    mixture.router.zero_()
    taken = torch.full((20,), 1 / 20).topk(4).indices.tolist()
    good = mixture.run(rows)
    mixture.spoil(set(range(20)) - set(taken))
    assert torch.equal(mixture.run(rows), good)
    mixture.spoil(taken[:1])
    assert mixture.run(rows).isnan().all()


@every_level
@pytest.mark.parametrize("gated", [False, True])
def test_experts_beside_an_mlp(isa: str, *, gated: bool) -> None:
    mixture = Mixture()
    mixture.put_beside_mlp(gated=gated)
    rows = mixture.rows(7)
    assert_near(mixture, rows, mixture.run(rows, isa=isa, num_threads=2))


def test_an_mlp_with_a_gate_of_its_output() -> None:
    """As qwen2_moe's shared experts have."""
    mixture = Mixture()
    mixture.put_beside_mlp()
    mixture.change(mlp_gate=torch.randn(HIDDEN, generator=mixture.generator) / 16)
    rows = mixture.rows(7)
    assert_near(mixture, rows, mixture.run(rows))


def test_norms_of_what_is_beside_each_other() -> None:
    """As in Gemma 4."""
    mixture = Mixture()
    mixture.put_beside_mlp()
    names = ("router_norm", "input_norm", "output_norm", "dense_output_norm")
    mixture.change(**{name: mixture.vector() for name in names})
    rows = mixture.rows(7)
    assert_near(mixture, rows, mixture.run(rows))
    layer, results = mixture.layer, [mixture.run(rows)]
    for name in names:
        without: dict[str, Any] = {name: None}
        mixture.change(**without)
        results.append(mixture.run(rows))
        mixture.layer = layer
    assert len({float(each.sum()) for each in results}) == 5


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 200])
def test_a_token_depends_on_no_other_and_on_no_thread(num_rows: int, num_threads: int) -> None:
    """Of 200 tokens, experts have several segments."""
    mixture = Mixture(6)
    rows = mixture.rows(num_rows)
    alone = torch.cat([mixture.run(row[None]) for row in rows])
    assert torch.equal(mixture.run(rows, num_threads=num_threads), alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_alone(bad: float) -> None:
    mixture = Mixture()
    rows = mixture.rows(5)
    good = mixture.run(rows)
    rows[2, 100] = bad
    result = mixture.run(rows)
    assert result[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(result[others], good[others])


def test_scores_that_overflow_are_not_a_number() -> None:
    mixture = Mixture()
    mixture.router.sign_().mul_(3e38)
    assert mixture.run(mixture.rows(2)).isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    mixture = Mixture()
    layer, own = mixture.layer, mixture.description
    gate, router = own.gate, own.router
    assert gate is not None
    for change in (
        {"gate": own.down},
        {"down": own.gate},
        {"gate": Projection(gate.weight.hadamard_form())},
        {"router": router[:, 32:].contiguous()},
        {"router": router[1:]},
        {"router": router.double()},
    ):
        with pytest.raises(ConfigError):
            evolve(own, **change)
    changes: list[dict[str, Any]] = [
        {"parallel": True},
        {"norm": "rms", "mlp_norm_bias": layer.mlp_norm},
        {"mixture": None, "qkv": (), "output": None},
        {"up": own.up},
        {"mixture": evolve(own, mlp_gate=layer.mlp_norm)},
        {"mixture": evolve(own, output_norm=layer.mlp_norm)},
    ]
    for change in changes:
        with pytest.raises(ConfigError):
            evolve(layer, **change)
    for num_selected in (0, 41):
        with pytest.raises(ConfigError, match="num_selected"):
            evolve(own.choice, num_selected=num_selected)
    with pytest.raises(ConfigError, match="contiguous"):
        evolve(own, router=router.T.contiguous().T)
    with pytest.raises(ConfigError, match="router_bias"):
        NativeDecoder(workspace(), [evolve(layer, mixture=evolve(own, router_bias=torch.zeros(3)))])
