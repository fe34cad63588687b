"""Read streamed answers as the clients of each face do, and check that they say what the whole answer says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

from paged_sdk import ChatCompletionChunkResponse, ChatCompletionResponse, RequestBuilder
from paged_sdk.blocking_stream import BlockingChatStream
from paged_sdk.mistralrs.callbacks import Rounds, StreamedRounds
from paged_sdk.mistralrs.responses import ChatCompletionResponse as DropInResponse
from paged_sdk.mistralrs.stream import ChatCompletionStream
from paged_sdk.wire.chat_completions import ChatCompletionCall
from paged_sdk.wire.messages_answer import BlockWriter, message_of
from paged_sdk.wire.responses_answer import ItemWriter, response_of

CALL: Final = "function_call"
ASKED: Final[Any] = {"reasoning": {"effort": None, "summary": None}}
"""What the writer of the responses API reads of a request."""


def data_of(events: str) -> list[dict[str, Any]]:
    """Return what server-sent events hold."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def of_calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def read_off(chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse) -> object:
    """Return what the chunks say, which is what the whole response says."""
    *before, last = chunks
    assert all(chunk.usage is None for chunk in before)
    assert last.usage == whole.usage
    found: list[Any] = []
    for place, choice in enumerate(whole.choices):
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == place]
        assert [piece.delta.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        deltas = [piece.delta for piece in pieces]
        assert "".join(delta.content for delta in deltas) == choice.message.content
        assert "".join(delta.reasoning_content or "" for delta in deltas) == (choice.message.reasoning_content or "")
        assert tuple(call for delta in deltas for call in delta.tool_calls) == choice.message.tool_calls
        logprobs = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content]
        assert logprobs == list(choice.logprobs.content if choice.logprobs else ())
        of_content = [each for piece in pieces if piece.content_logprobs for each in piece.content_logprobs.content]
        assert of_content == list(choice.content_logprobs.content if choice.content_logprobs else ())
        written: dict[int, list[str]] = {}
        ids: dict[int, str] = {}
        for call in [call for delta in deltas for call in delta.tool_call_deltas]:
            assert (call.id is None) == (call.name is None) == (call.index in written)
            written.setdefault(call.index, [call.name or ""]).append(call.arguments)
            ids.setdefault(call.index, call.id or "")
        for whole_call in choice.message.tool_calls:
            assert ids[whole_call.index] == whole_call.id
            name, *arguments = written[whole_call.index]
            assert (name, "".join(arguments)) == (whole_call.function.name, whole_call.function.arguments)
        texts = [(name, "".join(arguments)) for name, *arguments in written.values()]
        # What comes in which order: thoughts, text, and calls by their index.
        order: list[str] = []
        for delta in deltas:
            kinds = ["thought"] * bool(delta.reasoning_content) + ["text"] * bool(delta.content)
            kinds += [f"call {call.index}" for call in delta.tool_call_deltas]
            order += [kind for place, kind in enumerate(kinds) if ([*order[-1:], *kinds][place]) != kind]
        found.append((order, choice.message.content, choice.message.reasoning_content, texts, of_calls(choice)))
        found.append((choice.finish_reason, choice.stop_string, logprobs, of_content))
    return found


def of_chat_events(
    chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse, has_one_call: bool
) -> object:
    """Return what a client of chat completions makes of the events."""
    call = ChatCompletionCall(
        model="fake", request=RequestBuilder(), is_streamed=True, includes_usage=True, has_one_call=has_one_call
    )
    writer = call.writer()
    events = writer.begin(whole) + "".join(map(writer.chunk, chunks)) + writer.end(whole)
    assert events.endswith("data: [DONE]\n\n")
    *bodies, last = data_of(events)
    assert last["choices"] == []
    assert last["usage"] == whole.usage.to_dict()
    found = []
    for expected in call.response(whole)["choices"]:
        pieces = [piece for body in bodies for piece in body["choices"] if piece["index"] == expected["index"]]
        deltas, message = [piece["delta"] for piece in pieces], expected["message"]
        assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [expected["finish_reason"]]
        assert [each for piece in pieces for each in (piece["logprobs"] or {}).get("content", ())] == (
            (expected["logprobs"] or {}).get("content", [])
        )
        calls: dict[int, Any] = {}
        for piece in [piece for delta in deltas for piece in delta.get("tool_calls", ())]:
            if "id" in piece:
                assert piece["index"] not in calls
                calls[piece["index"]] = {"id": piece["id"], "type": "function", "function": dict(piece["function"])}
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        for each in message.get("tool_calls", ()):
            assert each in calls.values()
        found.append([each["function"] for each in calls.values()])
    return found


def of_items(
    chunks: Sequence[ChatCompletionChunkResponse],
    whole: ChatCompletionResponse,
    has_one_call: bool,
    *,
    has_bytes: bool = True,
) -> object:
    """Return the items that a client of the responses API makes of the events.

    :param has_bytes: whether each token is a byte
    """
    writer = ItemWriter(ASKED, has_one_call=has_one_call)
    events = data_of(writer.begin(whole) + "".join(map(writer.chunk, chunks)) + writer.end(whole))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    states: list[str] = []
    texts: list[str] = []
    logprobs: list[list[Any]] = []
    kinds = {"reasoning_text": "reasoning", "output_text": "message", "function_call_arguments": CALL}
    for event in events[2:-1]:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(items)
            # Only what may turn out to be a call ends later than the next one begins.
            assert not items or states[-1] == "done" or (items[-1]["type"], event["item"]["type"]) == (CALL, CALL)
            items.append(event["item"])
            states.append("open")
            texts.append("")
            logprobs.append([])
            continue
        assert event.get("item_id", items[place]["id"]) == items[place]["id"]
        is_call = items[place]["type"] == CALL
        if kind == "content_part.added":
            assert not is_call
        elif kind.endswith(".delta"):
            assert kinds[kind.removesuffix(".delta")] == items[place]["type"]
            assert states[place] == "open"
            assert event["delta"]
            texts[place] += event["delta"]
            if items[place]["type"] == "message":
                logprobs[place] += event["logprobs"]
                if has_bytes and whole.choices[0].logprobs is not None:
                    assert_made_of(event["delta"], event["logprobs"])
        elif kind == "content_part.done":
            assert states[place] == "text done"
            states[place] = "part done"
        elif kind == "output_item.done":
            assert states[place] == ("text done" if is_call else "part done")
            states[place] = "done"
            said = event["item"]["arguments"] if is_call else event["item"]["content"][0]["text"]
            assert said == texts[place]
            assert logprobs_of([event["item"]]) == logprobs[place]
            assert event["item"]["id"] == items[place]["id"]
            items[place] = event["item"]
        else:
            assert kinds[kind.removesuffix(".done")] == items[place]["type"]
            assert event["arguments" if is_call else "text"] == texts[place]
            assert event.get("logprobs", []) == logprobs[place]
            assert states[place] == "open"
            states[place] = "text done"
    assert states == ["done"] * len(items)
    assert len({item["id"] for item in items}) == len(items)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    expected: Any = response_of(whole, ASKED, has_one_call=has_one_call)
    assert {**last, "output": None, "completed_at": None} == {**expected, "output": None, "completed_at": None}
    assert items == expected["output"]
    ids = {call.id for call in whole.choices[0].message.tool_calls}
    others = [item["status"] for item in items if item["type"] == CALL and item["call_id"] not in ids]
    assert set(others) <= {"incomplete"}
    return [
        (item["type"], item.get("name"), item["status"], text, of_text)
        for item, text, of_text in zip(items, texts, logprobs, strict=True)
    ]


def assert_made_of(text: str, logprobs: Sequence[Any]) -> None:
    """Check that a text consists of tokens that are a byte each, but for line breaks that are put between messages."""
    data = bytes(byte for token in logprobs for byte in token["bytes"])
    assert data.replace(b"\n", b"") == text.replace("\n", "").encode()


def logprobs_of(items: Sequence[Any]) -> list[Any]:
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    return [each for part in parts for each in part["logprobs"]]


def of_blocks(
    chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse, has_one_call: bool
) -> object:
    """Return the blocks that a client of Anthropic's API makes of the events."""
    writer = BlockWriter("fake", max_tokens=999, has_one_call=has_one_call)
    events = data_of(writer.begin(whole) + "".join(map(writer.chunk, chunks)) + writer.end(whole))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    fields = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    for event in events[2:-2]:
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            is_open = True
            blocks.append(event["content_block"])
            texts.append("")
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            assert event["delta"][fields[blocks[-1]["type"]]]
            texts[-1] += event["delta"][fields[blocks[-1]["type"]]]
        elif event["type"] == "content_block_stop":
            is_open = False
    assert not is_open
    expected: Any = message_of(whole, "fake", max_tokens=999, has_one_call=has_one_call)
    assert events[-2]["usage"] == expected["usage"]
    assert {**events[-2]["delta"]} == {name: expected[name] for name in events[-2]["delta"]}
    ids = {call.id for call in whole.choices[0].message.tool_calls}
    written: list[list[Any]] = []  # without calls that did not become whole, between which a text may go on
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            written += [["tool_use", json.loads(text)]] if block["id"] in ids else []
        elif block["type"] == "text" and written and written[-1][0] == "text":
            written[-1][1] += text
        else:
            written.append([block["type"], text])
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    assert written == [[block["type"], block[values[block["type"]]]] for block in expected["content"]]
    return [(block["type"], block.get("name"), text) for block, text in zip(blocks, texts, strict=True)]


class Chunks:
    """Gives the chunks of a stream, as a blocking one does."""

    def __init__(self, chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse) -> None:
        self._chunks = iter(chunks)
        self._whole = whole

    def __next__(self) -> ChatCompletionChunkResponse:
        return next(self._chunks)

    def collect(self) -> ChatCompletionResponse:
        assert next(self._chunks, None) is None
        return self._whole

    def response_so_far(self) -> ChatCompletionResponse:
        return self._whole

    def close(self) -> None: ...


def of_drop_in(chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse) -> object:
    """Return what a program written for mistral.rs makes of its chunks."""
    found = list(ChatCompletionStream(Chunks(chunks, whole), adapter_generation=None, when_ended=lambda: None))
    expected = DropInResponse.of(whole, adapter_generation=None)
    assert [chunk.usage for chunk in found] == [None] * (len(found) - 1) + [whole.usage]
    for choice in expected.choices:
        pieces = [piece for chunk in found for piece in chunk.choices if piece.index == choice.index]
        said = choice.message
        assert "".join(piece.delta.content or "" for piece in pieces) == (said.content or "")
        assert "".join(piece.delta.reasoning_content or "" for piece in pieces) == (said.reasoning_content or "")
        assert [call for piece in pieces for call in piece.delta.tool_calls or ()] == (said.tool_calls or [])
        ends = [(piece.finish_reason, piece.stop_sequence) for piece in pieces]
        assert ends == [(None, None)] * (len(pieces) - 1) + [(choice.finish_reason, choice.stop_sequence)]
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        assert logprobs == ((choice.logprobs and choice.logprobs.content) or [])
    return None


def of_rounds(chunks: Sequence[ChatCompletionChunkResponse], whole: ChatCompletionResponse) -> object:
    """Return what such a program makes of an answer whose calls its callbacks do, and of the one after it."""
    told: list[tuple[str, dict[str, Any]]] = []

    def tell(name: str, given: dict[str, Any]) -> str:
        told.append((name, given))
        return "so"

    rounds = Rounds(RequestBuilder().add_message("user", "Go"), {"look": tell, "wait": tell}, 1)
    source = StreamedRounds(lambda _: cast(BlockingChatStream, Chunks(chunks, whole)), rounds)
    found = list(ChatCompletionStream(source, adapter_generation=None, when_ended=lambda: None))
    calls = whole.choices[0].message.tool_calls
    assert told == [(call.function.name, call.function.parse_arguments()) for call in calls]
    text = "".join(piece.delta.content or "" for chunk in found for piece in chunk.choices)
    assert text == whole.choices[0].message.content * (2 if calls else 1)
    shown = [call for chunk in found for piece in chunk.choices for call in piece.delta.tool_calls or ()]
    assert [call.id for call in shown] == [call.id for call in calls]
    assert [piece.finish_reason for piece in found[-1].choices] == [whole.choices[0].finish_reason]
    return told
