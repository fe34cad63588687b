from __future__ import annotations

import pytest

from paged_sdk import ConfigError, IsqType
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS


@pytest.mark.parametrize("isq", list(IsqType))
def test_every_type_reads_its_own_names(isq: IsqType) -> None:
    for text in (isq.value, isq.value.lower(), isq.gguf_name, f" {isq.gguf_name.lower()} "):
        assert IsqType.parse(text) is isq
    assert isq.gguf_name in {form.name for form in BLOCK_FORMATS.values()}


@pytest.mark.parametrize(
    ("bits", "isq"), [("4", IsqType.Q4K), ("5", IsqType.Q5K), ("6", IsqType.Q6K), ("8", IsqType.Q8_0)]
)
def test_bare_bits_pick_the_best_type(bits: str, isq: IsqType) -> None:
    assert IsqType.parse(bits) is isq


@pytest.mark.parametrize("text", ["", "Q9K", "3", "HQQ4", "int4"])
def test_an_unknown_type_names_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        IsqType.parse(text, setting="--isq")
    assert caught.value.setting == "--isq"
    for name in ("Q4K", "Q8_0", "4, 5, 6, 8"):
        assert name in str(caught.value)


def test_narrow_rows_and_heads_take_a_wider_type() -> None:
    assert IsqType.Q4K.for_narrow_rows is IsqType.Q5_0
    assert IsqType.Q4_0.for_narrow_rows is IsqType.Q4_0
    assert IsqType.Q4_0.for_head is IsqType.Q6K
    assert IsqType.Q6K.for_head is IsqType.Q8_0
    assert IsqType.Q6K.for_head.for_narrow_rows is IsqType.Q8_0
