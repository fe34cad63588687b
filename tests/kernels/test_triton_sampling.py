"""Choosing tokens, in Triton and by torch's operations, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels import sampling as ops
from paged_sdk.kernels.draw_settings import NEXT_TRY, DrawSettings

pytest.importorskip("triton")

import triton
import triton.language as tl

from paged_sdk.kernels.triton.sampling import uniform

Floats: TypeAlias = npt.NDArray[np.float64]
Draw: TypeAlias = Callable[[Tensor, DrawSettings], list[int]]


@pytest.fixture
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.kernels.triton.sampling._TILE", 64)
    monkeypatch.setattr("paged_sdk.kernels.triton.sampling._GROUP", 16)


short_tiles = pytest.mark.usefixtures("_short_tiles")


@pytest.fixture(params=["triton", "torch"])
def draw(request: pytest.FixtureRequest, triton_device: torch.device) -> Draw:
    from paged_sdk.kernels.triton import sampling as kernels

    def by_triton(logits: Tensor, settings: DrawSettings) -> list[int]:
        tokens: list[int] = kernels.draw(logits.to(triton_device), moved(settings, triton_device)).tolist()
        return tokens

    def by_torch(logits: Tensor, settings: DrawSettings) -> list[int]:
        tokens: list[int] = ops.draw(logits, settings).tolist()
        return tokens

    return by_triton if request.param == "triton" else by_torch


def moved(settings: DrawSettings, device: torch.device) -> DrawSettings:
    return DrawSettings(
        settings.temperature.to(device),
        settings.top_k.to(device),
        settings.top_p.to(device),
        settings.min_p.to(device),
        settings.streams.to(device),
        settings.positions.to(device),
    )


@frozen
class Row:
    """Holds the settings of one row."""

    temperature: float = 1.0
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0


def settings_of(rows: Sequence[Row], streams: Sequence[int] | None = None) -> DrawSettings:
    """Return the settings of rows; unless there are streams, each row has its own."""
    return DrawSettings(
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
        torch.arange(len(rows)) * 2**40 if streams is None else torch.tensor(streams),
        torch.arange(len(rows)) if streams is None else torch.zeros(len(rows), dtype=torch.int64),
    )


def random_logits(num_rows: int, vocab_size: int, spread: float = 3) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread


def weights_of(values: Floats, row: Row) -> Floats:
    """Return what top-k leaves, relative to the likeliest."""
    weights: Floats = np.exp((values - values.max()) / np.float32(row.temperature).astype(np.float64))
    falling = np.sort(values)[::-1]
    weights[values < falling[min(row.top_k, len(values)) - 1]] = 0
    return weights


def probabilities(values: Floats, row: Row) -> Floats:
    """Return the probability of every token."""
    weights = weights_of(values, row)
    _, rank = np.unique(-values, return_inverse=True)
    masses = np.bincount(rank, weights)
    larger = (masses.cumsum() - masses)[rank]  # what larger logits weigh
    kept = (weights >= row.min_p) & (larger < row.top_p * weights.sum())
    weights[~kept] = 0
    shares: Floats = weights / weights.sum()
    return shares


def naive_draw(values: Floats, row: Row, stream: int, position: int) -> tuple[int, float]:
    """Return the token, and how near a decision was to falling otherwise: float32 may fall to the other side."""
    if row.temperature == 0:
        return int(values.argmax()), 1.0
    weights = weights_of(values, row)
    enough = row.top_p * weights.sum() if row.top_p < 1 else np.inf
    total, margin = weights.sum(), 1.0
    if row.min_p:
        margin = np.abs(weights - row.min_p)[weights < 1].min(initial=1.0)
        weights[weights < row.min_p] = 0
    while True:
        number = ops.uniforms(torch.tensor([stream]), torch.tensor([position])).item()
        cumulative = weights.cumsum() / weights.sum()
        token = int((cumulative <= number).sum())
        above = weights[values > values[token]].sum()
        margin = min(margin, np.abs(cumulative - number).min(), abs(above - enough) / total if above else 1.0)
        if above == 0 or above < enough:
            return token, margin
        weights[values <= values[token]] = 0
        position += NEXT_TRY


def assert_drawn(logits: Tensor, rows: Sequence[Row], settings: DrawSettings, drawn: Sequence[int]) -> None:
    """Check each row's token, where no decision was within rounding."""
    skipped = 0
    for values, row, stream, position, token in zip(
        logits.double().numpy(), rows, settings.streams.tolist(), settings.positions.tolist(), drawn, strict=True
    ):
        expected, margin = naive_draw(values, row, stream, position)
        if margin < 1e-6:
            skipped += 1
        else:
            assert token == expected, row
    assert skipped <= len(rows) // 10


def streams_at(numbers: Sequence[float]) -> list[int]:
    """Find streams whose first number is each of these, to about 1e-5."""
    streams = torch.arange(200_000)
    ordered, index = ops.uniforms(streams, torch.zeros_like(streams)).sort()
    return index[torch.searchsorted(ordered, torch.tensor(numbers, dtype=torch.float64))].tolist()


EVERY_KIND = [
    Row(),
    Row(temperature=0.0),
    Row(temperature=0.6),
    Row(temperature=2.5, min_p=0.05),
    Row(top_k=1),
    Row(top_k=7),
    Row(temperature=3.0, top_k=40, min_p=0.3),
    Row(temperature=1.5, top_p=0.9),
    Row(temperature=4.0, top_p=0.999),
    Row(top_p=0.01),
    Row(temperature=2.0, top_k=50, top_p=0.8),
    Row(temperature=1.2, top_k=20, top_p=0.95, min_p=0.02),
]


@short_tiles
@pytest.mark.parametrize("vocab_size", [1, 64, 65, 300])
def test_the_likeliest_token(triton_device: torch.device, vocab_size: int) -> None:
    from paged_sdk.kernels.triton.sampling import argmax

    logits = random_logits(7, vocab_size).round()  # ties, also between tiles
    tokens = argmax(logits.to(triton_device))
    assert tokens.tolist() == logits.numpy().argmax(axis=1).tolist()
    assert torch.equal(ops.argmax(logits), tokens.cpu())


@short_tiles
@pytest.mark.parametrize("rounding", [None, 4], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab_size", [1, 50, 300])
def test_draws_with_every_setting(draw: Draw, vocab_size: int, rounding: int | None) -> None:
    logits = random_logits(len(EVERY_KIND), vocab_size)
    if rounding:
        logits = (logits * rounding).round() / rounding
    settings = settings_of(EVERY_KIND)
    assert_drawn(logits, EVERY_KIND, settings, draw(logits, settings))


@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "peaked"])
def test_large_vocabularies(draw: Draw, spread: float) -> None:
    rows = [Row(), Row(top_k=50), Row(top_p=0.9), Row(top_k=2000, top_p=0.5), Row(min_p=0.2)]
    logits = random_logits(len(rows), 20_000, spread)
    settings = settings_of(rows)
    assert_drawn(logits, rows, settings, draw(logits, settings))


@short_tiles
def test_the_last_token_kept(draw: Draw) -> None:
    """With a number near 1, tokens in falling order draw the least likely one that is left."""
    near_one = streams_at([0.9999])
    falling = torch.linspace(2, 1, 200)
    tied = torch.tensor([5.0] * 3 + [4.0] * 5 + [3.5, 3.5, 1.0])
    for logits, row, last in (
        (falling, Row(), 199),
        (falling, Row(top_k=199), 198),
        (falling, Row(top_k=100), 99),
        (falling, Row(top_k=2), 1),
        (falling, Row(top_k=1000), 199),
        (falling, Row(min_p=1.0), 0),
        (-falling.flip(0), Row(top_k=61), 60),
        (falling - 1.5, Row(top_k=101), 100),
        (torch.tensor([2.0, 0.0, -0.0, 0.0, -1.0]), Row(top_k=2), 3),
        (torch.tensor([2.0, 0.0, -0.0, 0.0, -1.0]), Row(top_k=4), 3),
        (tied, Row(top_k=1), 2),
        (tied, Row(top_k=3), 2),
        (tied, Row(top_k=4), 7),
        (tied, Row(top_k=9), 9),
        (tied, Row(min_p=0.3), 7),
        (tied, Row(top_k=8, min_p=0.3), 7),
        (tied, Row(temperature=1e-7), 2),
        (tied, Row(temperature=1e30), 10),
    ):
        assert draw(logits[None], settings_of([row], near_one)) == [last], row


@short_tiles
def test_top_p_keeps_what_makes_up_the_share_and_no_more(draw: Draw) -> None:
    """A share of n + 1/2 of 40 equal weights takes n + 1 tokens."""
    logits = torch.linspace(1e-4, 0, 40).expand(10, -1)
    last = list(range(0, 40, 4))
    rows = [Row(top_p=(token + 0.5) / 40) for token in last]
    assert draw(logits, settings_of(rows, streams_at([(token + 0.5) / 40 for token in last]))) == last
    instead = draw(logits, settings_of(rows, streams_at([(token + 1.5) / 40 for token in last])))
    assert all(token <= end for token, end in zip(instead, last, strict=True))


@short_tiles
def test_top_p_is_of_what_top_k_leaves(draw: Draw) -> None:
    """Of 3 tokens and 5 that weigh 1 / e of these, the former have the share 3 / (3 + 5 / e) = 0.62."""
    logits = torch.tensor([5.0] * 3 + [4.0] * 5 + [3.5, 3.5, 1.0])
    near_one = streams_at([0.9999])
    assert draw(logits[None], settings_of([Row(top_k=8, top_p=0.63)], near_one)) == [7]
    assert draw(logits[None], settings_of([Row(top_k=8, top_p=0.61)], near_one))[0] < 3
    assert draw(logits[None], settings_of([Row(top_k=8, top_p=0.63, min_p=0.5)], near_one)) == [2]
    assert draw(logits[None], settings_of([Row(top_p=1e-30)], near_one))[0] < 3
    assert draw(logits[None], settings_of([Row(top_p=1e-50)], near_one))[0] < 3  # 0 in float32


@short_tiles
def test_tokens_that_all_tie_are_all_kept(draw: Draw) -> None:
    zeros = torch.tensor([-0.0, 0.0] * 10)  # they compare equal, but their bits differ
    for row in (Row(top_p=0.3), Row(top_k=3), Row(top_k=19, top_p=0.01, min_p=1.0)):
        numbers = [0.024, 0.526, 0.976]
        assert draw(zeros.expand(3, -1), settings_of([row] * 3, streams_at(numbers))) == [0, 10, 19]


@short_tiles
def test_banned_tokens_are_not_drawn(draw: Draw) -> None:
    logits = torch.full((4, 100), -torch.inf)
    logits[:, [17, 55, 99]] = torch.tensor([1.0, 1.5, 0.5])
    rows = [Row(), Row(top_k=50), Row(top_p=0.99), Row(top_k=90, top_p=0.9999, min_p=0.01)]
    for start in range(3):
        settings = settings_of(rows, [start, start + 10, start + 20, start + 30])
        assert_drawn(logits, rows, settings, draw(logits, settings))


@short_tiles
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_without_a_token(draw: Draw, triton_device: torch.device, bad: float) -> None:
    from paged_sdk.kernels.triton.sampling import argmax

    logits = random_logits(4, 100)
    logits[1] = -torch.inf
    logits[2, 70] = bad
    logits[3, 5:] = -torch.inf
    expected = [False, True, True, False]
    for row in (Row(), Row(temperature=0.0), Row(top_k=9, top_p=0.7, min_p=0.1)):
        assert [token == ops.NOT_DRAWN for token in draw(logits, settings_of([row] * 4))] == expected
    for tokens in (argmax(logits.to(triton_device)), ops.argmax(logits)):
        assert [token == ops.NOT_DRAWN for token in tokens.tolist()] == expected


@short_tiles
def test_rows_do_not_depend_on_each_other(draw: Draw) -> None:
    """Nor on where they lie in memory."""
    logits = random_logits(len(EVERY_KIND), 150).repeat(1, 2)[:, 7:157]
    settings = settings_of(EVERY_KIND)
    together = draw(logits, settings)
    for index in range(0, len(EVERY_KIND), 5):
        own = DrawSettings(
            settings.temperature[index : index + 1],
            settings.top_k[index : index + 1],
            settings.top_p[index : index + 1],
            settings.min_p[index : index + 1],
            settings.streams[index : index + 1],
            settings.positions[index : index + 1],
        )
        assert draw(logits[index : index + 1].clone(), own) == [together[index]]


@pytest.mark.parametrize(
    "row",
    [Row(), Row(top_k=12), Row(top_p=0.8), Row(top_p=0.2), Row(top_k=30, top_p=0.6), Row(temperature=0.5, min_p=0.05)],
)
def test_draws_follow_the_distribution(row: Row) -> None:
    """Chi-square over the positions of a stream; by torch's operations, whose draws are Triton's."""
    logits, num_draws = random_logits(1, 60, spread=1), 20_000
    settings = settings_of([row] * num_draws, [5] * num_draws)
    settings.positions.copy_(torch.arange(num_draws))
    observed = ops.draw(logits.expand(num_draws, -1), settings).bincount(minlength=60).numpy()
    expected = probabilities(logits[0].double().numpy(), row) * num_draws
    likely = expected > 0
    assert observed[~likely].sum() == 0
    statistic = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < likely.sum() - 1 + 5 * np.sqrt(2 * likely.sum())


@triton.jit
def _uniform_kernel(streams_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    row = tl.program_id(0)
    tl.store(out_ptr + row, uniform(tl.load(streams_ptr + row), tl.load(positions_ptr + row)))


def test_random_numbers_are_the_same_bits(triton_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    streams = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    streams[:3] = torch.tensor([-1, 0, -(2**63)])
    positions = torch.randint(0, 2**31, (50,), generator=generator)
    out = torch.empty(50, dtype=torch.float64, device=triton_device)
    _uniform_kernel[(50,)](streams.to(triton_device), positions.to(triton_device), out)
    assert torch.equal(out.cpu(), ops.uniforms(streams, positions))


@short_tiles
def test_no_rows(draw: Draw, triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.sampling import argmax

    assert argmax(torch.zeros(0, 10, device=triton_device)).shape == (0,)
    assert draw(torch.zeros(0, 10), settings_of([])) == []


def test_settings_that_do_not_fit() -> None:
    settings = settings_of([Row()] * 3)
    with pytest.raises(ConfigError, match="temperature"):
        ops.draw(torch.zeros(2, 10), settings)
    with pytest.raises(ConfigError, match="logits"):
        ops.draw(torch.zeros(3, 10, dtype=torch.float64), settings)
