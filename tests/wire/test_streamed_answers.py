import json
from typing import Any, Final

import pytest

from paged_sdk import ChatCompletionChunkResponse, ChatCompletionResponse, ChunkChoice, Delta, ToolCallDelta, Usage
from paged_sdk.wire.messages_answer import BlockWriter
from paged_sdk.wire.responses_answer import ItemWriter

BEGUN: Final = ChatCompletionResponse(
    id="one",
    created=0,
    model="fake",
    choices=(),
    usage=Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0),
)


def chunk(content: str, *calls: ToolCallDelta) -> ChatCompletionChunkResponse:
    choice = ChunkChoice(index=0, delta=Delta(content=content, tool_call_deltas=calls))
    return ChatCompletionChunkResponse(id="one", created=0, model="fake", choices=(choice,))


# A client that reads slowly gets in one chunk what became of several tokens: the end of a call's arguments, the text
# after it (of a call that was cut off, too) and the next call.
CHUNKS: Final = [
    chunk("", ToolCallDelta(index=0, arguments="{", id="a", name="weather")),
    chunk(" and ", ToolCallDelta(index=0, arguments="}"), ToolCallDelta(index=1, arguments="[]", id="b", name="time")),
]


def events_of(writer: Any) -> list[dict[str, Any]]:
    text = writer.begin(BEGUN) + "".join(map(writer.chunk, CHUNKS))
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(("has_one_call", "items"), [(False, ["{}", " and ", "[]"]), (True, ["{}", " and "])])
def test_texts_after_a_call_do_not_part_its_arguments(has_one_call: bool, items: list[str]) -> None:
    said: Any = {}
    events = events_of(ItemWriter(said, has_one_call=has_one_call))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    kinds = {event["item"]["id"]: event["item"]["type"] for event in added}
    texts = dict.fromkeys(kinds, "")
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] += event["delta"]
            of_call = event["type"] == "response.function_call_arguments.delta"
            assert of_call == (kinds[event["item_id"]] == "function_call")
    assert list(texts.values()) == items


@pytest.mark.parametrize(("has_one_call", "blocks"), [(False, ["{}", " and ", "[]"]), (True, ["{}", " and "])])
def test_texts_after_a_call_do_not_part_its_input(has_one_call: bool, blocks: list[str]) -> None:
    events = events_of(BlockWriter("fake", max_tokens=9, has_one_call=has_one_call))
    kinds = {
        event["index"]: event["content_block"]["type"] for event in events if event["type"] == "content_block_start"
    }
    texts = dict.fromkeys(kinds, "")
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta.get("text", "") + delta.get("partial_json", "")
            assert (kinds[event["index"]] == "tool_use") == (delta["type"] == "input_json_delta")
    assert list(texts.values()) == blocks
