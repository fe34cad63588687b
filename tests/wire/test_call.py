"""What all APIs have in common on the wire."""

from __future__ import annotations

import json

import pytest

from paged_sdk.wire.call import event


@pytest.mark.parametrize("name", [None, "response.created"])
def test_an_event_has_the_same_lines_for_every_reader(name: str | None) -> None:
    """``str.splitlines``, which Python's HTTP clients read lines by, knows more ends of lines than events have."""
    said = "".join(map(chr, range(0x20))) + "\x7f\x85\xa0\u2028\u2029 é 日本 \U0001f600"
    lines = event({said: said}, name).splitlines()
    assert len(lines) == (2 if name is None else 3)
    assert lines.pop() == ""
    assert json.loads(lines[-1].removeprefix("data: ")) == {said: said}
    assert "é 日本" in lines[-1]
