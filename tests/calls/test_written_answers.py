"""The order in which an answer was written, beside what it consists of."""

from __future__ import annotations

import pytest

from paged_sdk import Choice, Delta, RequestBuilder, ResponseMessage, SamplingParams
from paged_sdk.testing import fake_model

pytestmark = pytest.mark.anyio

CALL = '<tool_call>{"name": "forecast", "arguments": {"city": "Oslo"}}</tool_call>'
TEXT = f"<think>Hm.</think>Let me see.{CALL}And then:{CALL}"


async def forecast(city: str) -> str:
    """Tell the weather."""
    return city


def kinds(delta: Delta) -> list[str]:
    said = {
        "thoughts": delta.reasoning_content,
        "text": delta.content,
        "begun": any(call.id is not None for call in delta.tool_call_deltas),
        "whole": delta.tool_calls,
    }
    return [kind for kind, is_there in said.items() if is_there]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (0, [["thoughts", "text", "begun", "whole"], ["text", "begun", "whole"]]),
        (9, [["thoughts", "text", "begun", "whole"], ["text", "begun"], ["text"]]),
        (len(CALL), [["thoughts", "text", "begun", "whole"], ["text"]]),
    ],
)
async def test_pieces_are_in_the_order_of_the_answer(cut: int, expected: list[list[str]]) -> None:
    sampling = SamplingParams(temperature=0, max_len=len(TEXT) - cut) if cut else SamplingParams(temperature=0)
    request = RequestBuilder().add_message("user", "?").with_tools([forecast]).with_sampling(sampling)
    async with fake_model(TEXT) as model:
        (choice,) = (await model.send_chat_request(request)).choices
        stream = model.stream_chat_request(request)
        deltas = [each.delta async for chunk in stream for each in chunk.choices]
        (streamed,) = stream.response_so_far().choices
    pieces = [piece.delta for piece in choice.pieces]
    assert [kinds(delta) for delta in pieces] == [kinds(piece.delta) for piece in streamed.pieces] == expected
    message = choice.message
    assert "".join(delta.content for delta in pieces) == message.content == "".join(delta.content for delta in deltas)
    assert "".join(delta.reasoning_content or "" for delta in pieces) == message.reasoning_content == "Hm."
    assert sum((delta.tool_calls for delta in pieces), ()) == message.tool_calls
    said = ["".join(call.arguments for delta in some for call in delta.tool_call_deltas) for some in (pieces, deltas)]
    assert said[0] == said[1]


def test_a_message_alone_is_one_piece() -> None:
    choice = Choice(finish_reason="stop", index=3, message=ResponseMessage(content="a", reasoning_content="b"))
    (piece,) = choice.pieces
    assert (piece.index, piece.delta.content, piece.delta.reasoning_content) == (3, "a", "b")
