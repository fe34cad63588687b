"""The steps for trial launch attention's kernels in every variant that an engine's steps may, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import pytest
import torch

pytest.importorskip("triton")

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.triton import paged_attention, paged_decode, paged_prefill
from paged_sdk.runner.warm_up import trial_steps

MULTIPROCESSORS: Final = 132
MAX_NUM_TOKENS: Final = 8192
MAX_MODEL_LEN: Final = 32_768
META: Final = torch.device("meta")
#: By query heads of a KV head: KV heads and the size of a head, as models have them; of 576: latent vectors.
HEADS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        1: (32, 96),
        2: (4, 256),
        3: (8, 128),
        4: (8, 128),
        5: (8, 128),
        6: (2, 128),
        7: (4, 128),
        8: (8, 64),
        16: (8, 128),
        20: (1, 576),
        32: (1, 128),
        128: (1, 576),
    }
)
Variant: TypeAlias = tuple[str, object, bool, bool]
Step: TypeAlias = tuple[int, int, int]
"""Holds the number of rows, the most new tokens of a row, and the longest context."""


class Launches:
    """Takes the place of kernels, and notes what decides which variant is compiled of each.

    :ivar found: name, rows of a tile, whether keys are split, whether there is a window
    """

    def __init__(self) -> None:
        self.found: set[Variant] = set()

    def of(self, name: str) -> Mapping[object, Any]:
        launches = self

        class Kernel(dict[object, Any]):
            def __missing__(self, grid: object) -> Any:
                def launch(**arguments: Any) -> None:
                    is_split = arguments.get("partial") is not None
                    has_window = arguments["window"] is not None
                    launches.found.add((name, arguments.get("block_m"), is_split, has_window))

                return launch

        return Kernel()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    noted = Launches()
    for module, name in (
        (paged_decode, "_attend_split"),
        (paged_decode, "_join_splits"),
        (paged_prefill, "_attend_tile"),
    ):
        monkeypatch.setattr(module, name, noted.of(name))
    for module in (paged_attention, paged_decode):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    return noted


class Model:
    """Has attention of some windows, with so many query heads to a KV head."""

    def __init__(self, launches: Launches, group: int, windows: tuple[int | None, ...]) -> None:
        self._launches = launches
        self._windows = windows
        num_kv_heads, head_dim = HEADS[group]
        pages = torch.empty(4, 16, num_kv_heads, head_dim, dtype=torch.bfloat16, device=META)
        key_only = 64 if head_dim == 576 else 0
        self._cache = LayerCache(pages, pages if key_only else torch.empty_like(pages), key_only=key_only)
        self._num_heads = group * num_kv_heads
        self._known: dict[tuple[Step, int | None], set[Variant]] = {}

    def variants(self, step: Step) -> set[Variant]:
        """Return what a step launches."""
        num_rows, count, longest = step
        found: set[Variant] = set()
        for each in self._windows:
            window = None if each is None or each >= longest else each
            if (step, window) not in self._known:
                self._launches.found.clear()
                rows = PagedRows(
                    block_tables=torch.empty(num_rows, 1, dtype=torch.int32, device=META),
                    context_lens=torch.empty(num_rows, dtype=torch.int32, device=META),
                    cu_seqlens_q=torch.empty(num_rows + 1, dtype=torch.int32, device=META),
                    max_seqlen_q=count,
                    max_context_len=longest,
                )
                shape = (num_rows - 1 + count, self._num_heads, self._cache.key.shape[-1])
                query = torch.empty(shape, dtype=torch.bfloat16, device=META)
                paged_attention.paged_attention(query, self._cache, rows, ScoreOptions(scale=1.0, window=window))
                self._known[step, window] = set(self._launches.found)
            found |= self._known[step, window]
        return found


def live_steps(max_num_rows: int) -> Iterator[Step]:
    """Yield steps as requests bring them: a chunk beside decodes, or the drafts of all rows."""
    num_rows = sorted({1, min(2, max_num_rows), min(7, max_num_rows), max_num_rows * 3 // 4 or 1, max_num_rows})
    counts = (1, 2, 3, 5, 6, 8, 11, 22, 43, 63, 100, 200, 700, 2048)
    for rows, count, longest in product(num_rows, counts, (0, 129, 201, 3294, 4097, MAX_MODEL_LEN)):
        if rows - 1 + count <= MAX_NUM_TOKENS:
            yield rows, count, max(count, longest)


@pytest.mark.thinned("windows", "max_num_rows", of=1)
@pytest.mark.parametrize("windows", [(None,), (4096, 4096), (4096, None), (512,), (128, None)], ids=str)
@pytest.mark.parametrize("max_num_rows", [1, 32, 256])
def test_the_steps_for_trial_reach_every_variant(
    launches: Launches, max_num_rows: int, windows: tuple[int | None, ...]
) -> None:
    steps = trial_steps(
        block_size=32,
        max_num_tokens=MAX_NUM_TOKENS,
        max_num_rows=max_num_rows,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
    )
    trial = {(len(rows), max(row.num_new_tokens for row in rows), max(row.end for row in rows)) for rows in steps}
    missing: dict[tuple[int, Variant], Step] = {}
    for group in HEADS:
        model = Model(launches, group, windows)
        launched = set[Variant]().union(*map(model.variants, trial))
        assert {name for name, *_ in launched} >= {"_attend_split", "_join_splits"}
        for step in live_steps(max_num_rows):
            missing |= dict.fromkeys(((group, each) for each in model.variants(step) - launched), step)
    assert not missing
