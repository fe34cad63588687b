"""What a topology says, in Python and in YAML, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paged_sdk import ConfigError, IsqType, LayerTopology, Topology

Q3K, Q4K, Q6K, Q8_0 = (LayerTopology(isq=isq) for isq in (IsqType.Q3K, IsqType.Q4K, IsqType.Q6K, IsqType.Q8_0))


def test_what_counts_before_what() -> None:
    topology = (
        Topology.empty()
        .with_range(range(2, 6), Q3K)
        .with_regex("down_proj", Q4K)
        .with_range(range(8), Q6K)
        .with_regex(re.compile("q_proj"), Q8_0)
        .with_range(range(4, 8), Q4K)
    )
    assert [str(each) for each in topology.by_weight()] == ["/q_proj/", "/down_proj/", "4-8", "0-8", "2-6"]
    assert Topology.empty().by_weight() == []


def test_devices() -> None:
    topology = Topology.new([0, 1]).with_range(range(2), Q3K)
    assert topology.devices == Topology.new(range(2)).devices == (0, 1)
    assert Topology.empty().devices is None
    for wrong in ([], [0, 0], [-1], [True], ["0"], 2, None):
        with pytest.raises(ConfigError, match="devices"):
            Topology.new(wrong)  # type: ignore[arg-type]


def test_a_file_says_what_calls_say(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("""
        # the first layers
        0-2: {isq: q3k}
        5:
          isq: 8
          device: cpu
        "/mlp\\\\.down_proj/":
          isq: Q6_K
        7: ~
    """)
    expected = (
        Topology.empty()
        .with_range(range(2), Q3K)
        .with_range(range(5, 6), LayerTopology(isq=IsqType.Q8_0, device="cpu"))
        .with_regex(r"mlp\.down_proj", Q6K)
        .with_range(range(7, 8), LayerTopology())
    )
    assert Topology.from_yaml(file) == Topology.from_yaml(str(file)) == expected
    file.write_text("# nothing\n")
    assert Topology.from_yaml(file) == Topology.empty()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8-8: {isq: Q4K}", r"'8-8' is not allowed: expected a range of at least one layer"),
        ("8-2: {isq: Q4K}", r"'8-2' .* at least one layer"),
        ("-1: {isq: Q4K}", r"'-1' .* expected a layer such as 5"),
        ("all: {isq: Q4K}", r"'all' .* /a regular expression/"),
        ("//: {isq: Q4K}", r"'//'"),
        ("/(/: {isq: Q4K}", r"'/\(/' .* a regular expression \("),
        ("0: {isq: Q9K}", r"'Q9K' .* one of Q2K"),
        ("0: {isq: [Q4K]}", r"'0' .* selectors, each with isq and device"),
        ("0: {bits: 4}", r"'0: bits' .* isq and device"),
        ("0: Q4K", r"'0' .* selectors, each with isq and device"),
        ("[1, 2]", r"selectors, each with isq and device, in topology\.yaml"),
        ("text", r"selectors, each with"),
        ("? [1, 2]\n: {isq: Q4K}", r"selectors, each with"),
        ("0: {isq: Q4K}\n0: {isq: Q6K}", r"'0' .* once"),
        ("0: {isq: Q4K, isq: Q6K}", r"'isq' .* once"),
        ("0: {isq: Q4K", r"topology\.yaml' .* YAML"),
        ("a: *b", r"YAML"),
        ("[" * 5000, r"YAML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        Topology.from_yaml(file)
    assert caught.value.setting == "topology"
    assert len(str(caught.value)) < 600


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be read"):
        Topology.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="a file that can be read"):
        Topology.from_yaml(tmp_path / "bytes")


@pytest.mark.parametrize("layers", [range(0), range(5, 2), range(0, 8, 2), range(-1, 3), 5, "0-8"])
def test_layers_that_are_none_are_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match="range"):
        Topology.empty().with_range(layers, Q4K)


def test_other_values_are_refused() -> None:
    anything: Any = IsqType.Q4K
    with pytest.raises(ConfigError, match="layer = "):
        Topology.empty().with_range(range(1), anything)
    with pytest.raises(ConfigError, match="layer = "):
        Topology.empty().with_regex("x", anything)
    with pytest.raises(ConfigError, match=r"pattern = '\*'"):
        Topology.empty().with_regex("*", Q4K)
    with pytest.raises(ConfigError, match="isq"):
        LayerTopology(isq="Q4K")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="topology"):
        Topology((Q4K,))  # type: ignore[arg-type]
