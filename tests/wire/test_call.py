"""What all APIs have in common on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged_sdk import InvalidRequestError
from paged_sdk.wire.call import event
from paged_sdk.wire.chat_completions import read_chat_completion
from paged_sdk.wire.problem import problem_of
from test_tools import saying


@pytest.mark.parametrize("name", [None, "response.created"])
def test_an_event_has_the_same_lines_for_every_reader(name: str | None) -> None:
    """``str.splitlines``, which Python's HTTP clients read lines by, knows more ends of lines than events have."""
    said = "".join(map(chr, range(0x20))) + "\x7f\x85\xa0\u2028\u2029 é 日本 \U0001f600"
    lines = event({said: said}, name).splitlines()
    assert len(lines) == (2 if name is None else 3)
    assert lines.pop() == ""
    assert json.loads(lines[-1].removeprefix("data: ")) == {said: said}
    assert "é 日本" in lines[-1]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": [TOOL]}, "the model's chat template takes no tools"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "this model takes no images"),
    ],
)
async def test_clients_are_not_told_what_the_application_could_do(body: dict[str, Any], expected: str) -> None:
    call = read_chat_completion({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body})
    async with saying("Hi", "{{ messages[0].content }}", ()) as model:
        with pytest.raises(InvalidRequestError) as caught:
            await model.send_chat_request(call.request)
    assert str(caught.value) == f"{expected}: {caught.value.advice}"
    assert caught.value.advice
    assert problem_of(caught.value).message == expected
