from __future__ import annotations

import pytest

from paged_sdk import ConfigError, IsqType
from paged_sdk.config.isq import IsqFamily


@pytest.mark.parametrize("isq", list(IsqType))
def test_every_type_reads_its_own_names(isq: IsqType) -> None:
    texts = [isq.value, isq.value.lower(), f" {isq.value} "]
    if isq.family is IsqFamily.K:
        texts += [f"Q{isq.bits}_K", f"q{isq.bits}_k"]
    for text in texts:
        assert IsqType.parse(text) is isq
    assert str(isq.bits) in isq.value
    assert IsqType.parse("q8k") is IsqType.parse("Q8_K") is IsqType.Q8_0


@pytest.mark.parametrize(
    ("bits", "isq"),
    [
        ("2", IsqType.Q2K),
        ("3", IsqType.Q3K),
        ("4", IsqType.Q4K),
        ("5", IsqType.Q5K),
        ("6", IsqType.Q6K),
        ("8", IsqType.Q8_0),
    ],
)
def test_bare_bits_pick_the_best_type(bits: str, isq: IsqType) -> None:
    assert IsqType.parse(bits) is isq


@pytest.mark.parametrize("text", ["", "Q9K", "7", "int4"])
def test_an_unknown_type_names_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        IsqType.parse(text, setting="--isq")
    assert caught.value.setting == "--isq"
    for name in ("Q4K", "Q8_0", "2, 3, 4, 5, 6, 8"):
        assert name in str(caught.value)
