"""The study of KV formats: what it rounds is judged by the gguf package and by models that have known keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
import typer
from benchmarks.divergence import divergence
from benchmarks.inside import open_engine
from benchmarks.kv_formats import FORMATS, Affine, Float8, KvFormat, Offsets, Rotated, Rounding, Symmetric, hadamard
from benchmarks.kv_study import KvStudy, main
from torch import Tensor

import tiny
from native_weights import needs_library
from paged_sdk import TextModelBuilder

TOKENS: Final = list(range(5, 165))


class Exact:
    """Rounds nothing."""

    def bits(self, head_dim: int) -> float:
        return 32

    def __call__(self, vectors: Tensor) -> Tensor:
        return vectors


def vectors() -> Tensor:
    return torch.randn(64, 3, 64, generator=torch.Generator().manual_seed(7))


def error(rounding: Rounding, exact: Tensor) -> float:
    return float((rounding(exact) - exact).square().mean() / exact.square().mean())


@pytest.mark.parametrize(
    ("rounding", "kind"),
    [(Symmetric(), "Q4_0"), (Affine(32, searches=False), "Q4_1")],
)
def test_groups_are_those_of_llama_cpp(rounding: Rounding, kind: str) -> None:
    exact, quantization = vectors(), gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(exact.numpy(), quantization)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, quantization))
    assert rounding.bits(64) == 8 * packed.nbytes / exact.numel()
    found = rounding(exact)
    # Its codes are for a scale that is not yet rounded to float16, so that a number halfway may go to the other side.
    assert float((found == expected).float().mean()) > 0.99
    assert error(rounding, exact) == pytest.approx(
        float((expected - exact).square().mean() / exact.square().mean()), rel=0.01
    )


def test_the_best_range_is_no_worse_for_any_group() -> None:
    exact = vectors()
    plain, best = (
        torch.unflatten(Affine(32, searches=searches)(exact) - exact, -1, (2, 32)).square().sum(-1)
        for searches in (False, True)
    )
    assert (best <= plain).all()
    assert float(best.mean()) < 0.95 * float(plain.mean())


@pytest.mark.parametrize("rounding", [Affine(32), Symmetric(), Rotated(Affine(32)), Float8()])
def test_zeros_stay_zeros(rounding: Rounding) -> None:
    assert rounding(torch.zeros(2, 64)).abs().max() < 1e-6


@pytest.mark.parametrize("size", [64, 96, 128])
def test_rotation_keeps_products_and_spreads_one_element(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    assert len(set(matrix.abs().round(decimals=6).flatten().tolist()) - {0.0}) == 1


def test_rotation_helps_where_one_element_is_large() -> None:
    exact = vectors()
    exact[..., 5] *= 50
    small = torch.arange(64) != 5
    plain, rotated = (
        (rounding(exact) - exact)[..., small].square().mean() for rounding in (Affine(64), Rotated(Affine(64)))
    )
    assert rotated < 0.5 * plain


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> KvStudy:
    """A model whose keys have a bias far larger than what differs from key to key."""
    path = tmp_path_factory.mktemp("biased")
    tiny.make_checkpoint("qwen2", path, hidden_size=128, head_dim=32, rope_theta=1e6)
    model: Any = tiny.build_model("qwen2", hidden_size=128, head_dim=32, rope_theta=1e6)
    for layer in model.model.layers:
        # In the pair that turns least.
        layer.self_attn.k_proj.bias.data.view(2, 32)[:, [15, 31]] += 500.0
    model.save_pretrained(path)
    builder = TextModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("float32")
    return KvStudy(open_engine(builder))


@needs_library
@pytest.mark.parametrize("offsets", Offsets)
@pytest.mark.parametrize("balanced", [False, True])
def test_without_rounding_nothing_changes(biased: KvStudy, offsets: Offsets, balanced: bool) -> None:
    exact = KvFormat(keys=Exact(), values=Exact(), offsets=offsets, balanced=balanced)
    expected, found = (biased.logits(TOKENS, each) for each in (None, exact))
    # Adding and subtracting 500 rounds at 2^-16; these keys differ by a few units.
    assert divergence(expected, found).mean_kl < 1e-5


@needs_library
def test_offsets_save_keys_with_a_bias(biased: KvStudy) -> None:
    expected = biased.logits(TOKENS, None)
    kl = {
        offsets: divergence(
            expected, biased.logits(TOKENS, KvFormat(keys=Affine(32), values=Exact(), offsets=offsets))
        ).mean_kl
        for offsets in Offsets
    }
    assert kl[Offsets.BIAS] < 0.2 * kl[Offsets.NONE]
    assert kl[Offsets.MEASURED] < 0.2 * kl[Offsets.NONE]


@needs_library
def test_the_engines_own_types_do_as_their_formats(biased: KvStudy) -> None:
    """A search of fewer ranges, and bfloat16 scales, cost little."""
    expected = biased.logits(TOKENS, None)
    for stored, simulated in (
        ("PagedCacheType.F8E4M3", "f8e4m3, measured offsets"),
        ("PagedCacheType.Q4", "4 bits, balanced"),
    ):
        found, due = (
            divergence(expected, biased.logits(TOKENS, FORMATS[name])).mean_kl for name in (stored, simulated)
        )
        assert 0 < found < 1.3 * due


@needs_library
def test_a_token_is_rounded_alone(biased: KvStudy) -> None:
    """However the text is cut, and whatever comes after."""
    biased.format = FORMATS["4 bits, balanced"]
    whole = biased.engine.logits(TOKENS, chunk=256)
    for found in (biased.engine.logits(TOKENS, chunk=48), biased.engine.logits(TOKENS[:100], chunk=256)):
        torch.testing.assert_close(found, whole[: len(found)], rtol=1e-3, atol=1e-3)


@needs_library
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.make_gguf(tmp_path, hidden_size=128, head_dim=32)
    main(
        model=str(path),
        tokens=60,
        skip=10,
        texts=2,
        formats="f8e4m3; 4 bits; PagedCacheType.Q4",
        chat="Once upon a time",
        threads=1,
        output=tmp_path / "out.json",
    )
    report = json.loads((tmp_path / "out.json").read_text())
    eight, four = report["formats"]["f8e4m3"], report["formats"]["4 bits"]
    assert (eight["bits"], four["bits"]) == (9, 5)
    assert 0 < eight["mean_kl"] < four["mean_kl"]
    for name, row in report["formats"].items():
        assert row["mean_kl"] == pytest.approx(np.mean([each["mean_kl"] for each in report["texts"][name]]))
    assert set(report["answers"]) == {"unrounded", "f8e4m3", "4 bits", "PagedCacheType.Q4"}
    assert report["formats"]["PagedCacheType.Q4"]["bits"] == 5
    assert "top-1" in capsys.readouterr().out


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'5 bits': expected some of f8e4m3;"):
        main(formats="5 bits")
