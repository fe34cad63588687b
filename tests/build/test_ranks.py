"""Where ranks compute: on which NUMA nodes, with how many threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import evolve

from paged_sdk import ConfigError, Topology
from paged_sdk.build.ranks import ranks
from paged_sdk.build.ranks.ranks import RankPlacement, check_ranks, place_launched_rank, place_ranks
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.launch import Launch

LOW, HIGH = frozenset(range(6)), frozenset(range(6, 10))


def placements(
    nodes: Mapping[int, frozenset[int]], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[RankPlacement]:
    monkeypatch.setattr(ranks, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(ranks, "usable_processors", lambda: sum(map(len, nodes.values())))
    return list(place_ranks(BuildSettings(device="cpu", **settings)))


@pytest.mark.parametrize(
    ("nodes", "settings", "expected"),
    [
        ({0: LOW, 2: HIGH}, {}, [(None, None)]),
        ({0: LOW, 2: HIGH}, {"tensor_parallel": 1}, [(None, None)]),
        ({0: LOW, 2: HIGH}, {"tensor_parallel": "auto"}, [(5, LOW), (4, HIGH)]),
        ({0: LOW, 2: HIGH}, {"tensor_parallel": 2, "num_threads": 5}, [(3, LOW), (2, HIGH)]),
        ({0: LOW, 2: HIGH}, {"tensor_parallel": 4}, [(3, LOW), (3, LOW), (2, HIGH), (2, HIGH)]),
        ({0: LOW, 2: HIGH}, {"tensor_parallel": 3}, [(4, None), (3, None), (3, None)]),
        ({0: LOW, 2: HIGH}, {"topology": Topology.new([2, 0])}, [(4, HIGH), (5, LOW)]),
        ({0: LOW, 2: HIGH}, {"topology": Topology.new([2])}, [(4, HIGH)]),
        ({0: LOW, 2: HIGH}, {"topology": Topology.new([0, 2]), "tensor_parallel": "auto"}, [(5, LOW), (4, HIGH)]),
        ({0: LOW}, {"tensor_parallel": "auto"}, [(None, None)]),
        ({0: LOW}, {"topology": Topology.new([0]), "num_threads": 2}, [(2, None)]),
        ({0: LOW}, {"tensor_parallel": 2}, [(3, None), (3, None)]),
        ({0: LOW}, {"tensor_parallel": 8}, [(1, None)] * 8),
    ],
)
def test_where_ranks_compute(
    nodes: Mapping[int, frozenset[int]],
    settings: dict[str, Any],
    expected: list[tuple[int | None, frozenset[int] | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = placements(nodes, monkeypatch, **settings)
    assert [(placement.num_threads, placement.processors) for placement in found] == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"topology": Topology.new([0, 1])}, "Topology.devices = 1 .* expected 0, 2, the NUMA nodes"),
        ({"topology": Topology.new([0, 2]), "tensor_parallel": 3}, "with_tensor_parallel = 3 .* 2, as many"),
        ({"topology": Topology.new([0, 2]), "tensor_parallel": 1}, "with_tensor_parallel = 1 .* 2, as many"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=said):
        placements({0: LOW, 2: HIGH}, monkeypatch, **settings)


@pytest.mark.parametrize(
    ("local", "settings", "expected"),
    [
        ((0, 1), {"tensor_parallel": "auto"}, (None, None)),
        ((0, 1), {"tensor_parallel": 4, "num_threads": 3}, (3, None)),
        ((0, 2), {"tensor_parallel": 4}, (5, LOW)),
        ((1, 2), {"tensor_parallel": 4}, (4, HIGH)),
        ((2, 3), {"tensor_parallel": "auto", "num_threads": 4}, (1, None)),
    ],
)
def test_a_process_that_was_started_as_one_of_several(
    local: tuple[int, int],
    settings: dict[str, Any],
    expected: tuple[int | None, frozenset[int] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {0: LOW, 1: HIGH}
    placements(nodes, monkeypatch)
    launch = Launch(rank=3, size=4, local_rank=local[0], local_size=local[1], address="first", port=1)
    placement = place_launched_rank(BuildSettings(device="cpu", **settings), launch)
    assert (placement.num_threads, placement.processors) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel": 2}, "with_tensor_parallel = 2 .* expected 4, as WORLD_SIZE says"),
        ({"topology": Topology.new([0, 1])}, r"Topology.devices = \[0, 1\] .* nothing beside WORLD_SIZE = 4"),
    ],
)
def test_what_is_refused_of_one_of_several(settings: dict[str, Any], said: str) -> None:
    launch = Launch(rank=0, size=4, address="first", port=1)
    with pytest.raises(ConfigError, match=said):
        place_launched_rank(BuildSettings(device="cpu", **settings), launch)


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [None]),
        ({"tensor_parallel": "auto"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"tensor_parallel": 2, "device": "cuda"}, ["cuda:0", "cuda:1"]),
        ({"topology": Topology.new([2, 0])}, ["cuda:2", "cuda:0"]),
        ({"topology": Topology.new([1])}, ["cuda:1"]),
    ],
)
def test_a_rank_is_on_a_gpu_of_its_own(settings: dict[str, Any], expected: list[str | None]) -> None:
    found = place_ranks(BuildSettings(num_threads=6, **settings))
    assert [placement.device for placement in found] == expected
    assert sum(placement.num_threads or 0 for placement in found) == 6
    assert [placement.of(BuildSettings()).device for placement in found] == [each or "auto" for each in expected]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel": 4}, "with_tensor_parallel = 4 .* at most 3, the number of GPUs"),
        ({"topology": Topology.new([0, 3])}, "Topology.devices = 3 .* a number below 3"),
        ({"tensor_parallel": 2, "device": "cuda:1"}, "device = 'cuda:1' .* without a number"),
    ],
)
def test_gpus_that_there_are_not(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_ranks(BuildSettings(**settings))


@pytest.mark.parametrize(("count", "local_rank", "expected"), [(3, 2, "cuda:2"), (1, 2, "cuda:0")])
def test_a_process_is_on_the_gpu_of_its_number(
    count: int, local_rank: int, expected: str, three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    launch = Launch(rank=2, size=4, local_rank=local_rank, local_size=4, address="first", port=1)
    assert place_launched_rank(BuildSettings(tensor_parallel="auto"), launch).device == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK = 3 .* a number below 2"):
        place_launched_rank(BuildSettings(tensor_parallel="auto"), evolve(launch, local_rank=3))


GPU, OTHER, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "settings", "said"),
    [
        ([GPU, OTHER], {}, "one device for each rank, and nothing on cuda:1"),
        ([CPU, GPU], {}, "one device for each rank, and nothing on cuda:0"),
        ([torch.device("mps")], {}, "a model on the CPU or on GPUs of CUDA"),
        ([GPU], {"paged_attn": False}, "paged attention, on GPUs"),
    ],
)
def test_what_several_ranks_cannot_do(
    devices: list[torch.device], settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "is_nccl_available", lambda: True)
    check_ranks(BuildSettings(**settings), 1, devices)
    with pytest.raises(ConfigError, match=f"with_tensor_parallel = 2 .* expected {said}"):
        check_ranks(BuildSettings(**settings), 2, devices)


def test_gpus_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="a torch with NCCL"):
        check_ranks(BuildSettings(), 2, [GPU])
    check_ranks(BuildSettings(), 2, [CPU])
