"""How much memory steps need, and what is said when it is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paged_sdk import BlockingModel, OutOfMemoryError, TextModelBuilder
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.kernels.step import AttentionStep, StepContext
from paged_sdk.runner.activations import activation_bytes, cuda_peak_bytes
from paged_sdk.types.step import StepRow
from recorded_steps import ATTENDING, Attending

CPU = torch.device("cpu")


class Watched(Attending):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        self.calls.append((len(token_ids), int(positions.max())))
        return super().forward(token_ids, positions, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        raise AssertionError("no step for trial reads hidden states")

    def logits(self, hidden: Tensor, adapted: object = None) -> Tensor:
        self.calls.append(tuple(hidden.shape))
        return super().logits(hidden, adapted)


class WatchedBackend(PagedBackend):
    """Stands in for storage and notes the rows that it is given."""

    rows: Sequence[StepRow] = ()

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        self.rows = rows
        return super().prepare(rows)


@pytest.mark.parametrize("measured", [7_777, 0])
@pytest.mark.parametrize(
    ("tokens", "rows", "logits", "counts"),
    [(10, 4, 4, [3, 3, 2, 2]), (10, 4, 8, [3, 3, 2, 2]), (3, 8, 24, [1, 1, 1]), (9, 1, 1, [9])],
)
def test_the_largest_step_is_run(tokens: int, rows: int, logits: int, counts: list[int], measured: int) -> None:
    model = Watched()
    made: list[WatchedBackend] = []
    settings = PoolSettings(block_size=4, dtype=torch.float32, device=CPU)

    def make(num_blocks: int) -> AttentionBackend:
        made.append(WatchedBackend(ATTENDING, settings, num_blocks))
        return made[-1]

    def peak(run: Callable[[], None]) -> int:
        run()
        return measured

    found = activation_bytes(
        model, make, block_size=4, num_tokens=tokens, num_rows=rows, num_logits=logits, peak_bytes=peak
    )
    computed = min(logits, tokens)
    # Hidden states of 64 floats and logits of 50 are there at the end, whatever is measured.
    assert found == max(measured, (tokens * 64 + computed * 50) * 4)
    assert model.calls == [(tokens, counts[0] - 1), (computed, 64)]
    (backend,) = made
    assert [row.num_new_tokens for row in backend.rows] == counts
    used = [block for row in backend.rows for block in row.kv_ids]
    assert sorted(used) == list(range(backend.num_blocks))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_on_a_gpu() -> None:
    device = torch.device("cuda")
    kept = []

    def run() -> None:
        for _ in range(3):
            torch.empty(1 << 22, device=device)  # for less than 10 MiB torch takes 20 of the device
        kept.append(torch.empty(1 << 10, device=device))

    assert 1 << 24 <= cuda_peak_bytes(device)(run) < 3 << 24


def test_weights_that_do_not_fit(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("paged_sdk.models.any_model.load_model", load)
    with pytest.raises(OutOfMemoryError, match=r"do not fit cpu: [\d.]+ MiB were free") as caught:
        BlockingModel(TextModelBuilder(tiny_checkpoint).with_force_cpu().build())
    assert caught.value.needed == sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors"))
    assert caught.value.available > 0
