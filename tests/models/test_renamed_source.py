"""A checkpoint's tensors under the names of a transformers class."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from reference_decoding import DictSource
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from paged_sdk.models.transformers_door import renamed_source
from paged_sdk.models.transformers_door.renamed_source import RenamedSource
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.policy import DENSE

CPU = torch.device("cpu")
PARTS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


class CountedSource(DictSource):
    """Counts how often tensors are read, slowly enough for other threads to come meanwhile."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.num_reads = 0

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.num_reads += 1
        time.sleep(0.02)
        return super().tensor(name, dtype, device)


class Attention(nn.Module):
    base_model_prefix = "model"
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 6, bias=False) for _ in range(3))


def kept(renamed: RenamedSource) -> Collection[Any]:
    return [name for recipe in renamed._made.values() for name in recipe.ready]


def test_threads_share_what_one_rule_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [WeightConverter(["qkv.weight"], list(PARTS), [Chunk(dim=0)])]
    monkeypatch.setattr(renamed_source, "get_model_conversion_mapping", lambda model: rules)
    whole = torch.arange(72.0).view(18, 4)
    source = CountedSource({"qkv.weight": whole})
    renamed = RenamedSource(source, cast(PreTrainedModel, Attention()), ())
    assert sorted(renamed.names()) == sorted(PARTS)
    start = threading.Barrier(len(PARTS))

    def load(name: str) -> Tensor:
        start.wait()
        assert renamed.shape(name) == (6, 4)
        return renamed.tensor(name, torch.float32, CPU)

    with ThreadPoolExecutor(len(PARTS)) as pool:
        parts = list(pool.map(load, PARTS))
    assert torch.equal(torch.cat(parts), whole)
    assert source.num_reads == 1
    assert not kept(renamed)


def test_parts_of_one_matrix_have_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topologies select that name, and a cache of quantized matrices tells the parts apart."""
    rules = [WeightConverter(["qkv.weight"], list(PARTS), [Chunk(dim=0)])]
    monkeypatch.setattr(renamed_source, "get_model_conversion_mapping", lambda model: rules)
    renamed = RenamedSource(
        CountedSource({"qkv.weight": torch.zeros(18, 4)}), cast(PreTrainedModel, Attention()), frozenset()
    )
    loader = WeightLoader(
        renamed, DENSE, dtype=torch.float32, device=CPU, prefixes=("",), stored_name=renamed.stored_name
    )
    read = [loader.matrix(name, 6, 4) for name in PARTS]
    assert [each.name for each in read] == ["qkv.weight"] * 3
    halves = [half for each in read for half in each.split([2, 4])]
    assert len({(each.name, each.index, each.cut) for each in halves}) == 6
