"""The wire form of responses, judged by the models of OpenAI's own client."""

from __future__ import annotations

import json
import math
from typing import Any, Final, TypeVar

import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import ChoiceLogprobs
from pydantic import BaseModel

from paged_sdk import Model, RequestBuilder, SamplingParams
from paged_sdk.testing import fake_model
from paged_sdk.types.logprobs import Logprobs, TokenLogprob, TopLogprob
from paged_sdk.types.response import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionChunkResponse,
    CompletionResponse,
    Delta,
    FinishReason,
    PromptTokensDetails,
    ResponseMessage,
    Usage,
)

ModelT = TypeVar("ModelT", bound=BaseModel)

USAGE: Final = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    total_tokens=7,
    avg_tok_per_sec=12.5,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=3),
)


def token(text: str | bytes, token_id: int = 7, logprob: float = -0.5, top: tuple[str, ...] = ()) -> TokenLogprob:
    data = text.encode() if isinstance(text, str) else text
    likely = tuple(
        TopLogprob(token=other, token_id=rank, logprob=-float(rank), bytes=tuple(other.encode()))
        for rank, other in enumerate(top)
    )
    return TokenLogprob(
        token=data.decode(errors="replace"), token_id=token_id, logprob=logprob, bytes=tuple(data), top_logprobs=likely
    )


def logprobs(*tokens: TokenLogprob) -> Logprobs:
    return Logprobs(content=tokens)


def chat(choice: Choice, **fields: Any) -> ChatCompletionResponse:
    return ChatCompletionResponse(
        id="chatcmpl-1", created=1700000000, model="m", choices=(choice,), usage=USAGE, **fields
    )


def said(reason: FinishReason = "stop", likely: Logprobs | None = None) -> Choice:
    return Choice(finish_reason=reason, index=0, message=ResponseMessage(content="Héllo"), logprobs=likely)


def completion(text: str, likely: Logprobs | None) -> CompletionResponse:
    choice = CompletionChoice(finish_reason="stop", index=0, text=text, logprobs=likely)
    return CompletionResponse(id="cmpl-1", created=1700000000, model="m", choices=(choice,), usage=USAGE)


def read(model: type[ModelT], sent: dict[str, Any]) -> ModelT:
    """Let OpenAI's client read a wire form, from Python and from JSON, without any conversion of types."""
    read = model.model_validate(sent, strict=True)
    assert model.model_validate_json(json.dumps(sent), strict=True) == read
    return read


def test_a_chat_response_is_what_openais_client_reads() -> None:
    response = chat(said(likely=logprobs(token("Hé", top=("Hé", "Ho")), token("llo"))))
    seen = read(ChatCompletion, response.to_dict())
    choice = seen.choices[0]
    assert (seen.id, seen.object, seen.created, seen.model) == ("chatcmpl-1", "chat.completion", 1700000000, "m")
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "Héllo", None)
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("Hé", [72, 195, 169], -0.5)
    assert [top.token for top in first.top_logprobs] == ["Hé", "Ho"]
    assert seen.usage is not None
    assert (seen.usage.prompt_tokens, seen.usage.completion_tokens, seen.usage.total_tokens) == (5, 2, 7)
    assert seen.usage.prompt_tokens_details is not None
    assert seen.usage.prompt_tokens_details.cached_tokens == 3


def test_extensions_stay() -> None:
    response = chat(said(), prompt_logprobs=logprobs(token("a")))
    sent = response.to_dict()
    assert sent["usage"]["avg_tok_per_sec"] == 12.5
    assert sent["prompt_logprobs"]["content"][0]["token_id"] == 7
    seen = read(ChatCompletion, sent)
    assert seen.model_extra is not None
    assert seen.model_extra["prompt_logprobs"] == sent["prompt_logprobs"]
    assert "prompt_logprobs" not in chat(said()).to_dict()


@pytest.mark.parametrize("reason", ["stop", "length", "canceled"])
def test_every_finish_reason_is_one_of_openais(reason: FinishReason) -> None:
    sent = said(reason).to_dict()
    seen = read(ChatCompletion, chat(said(reason)).to_dict())
    assert seen.choices[0].finish_reason == ("length" if reason == "canceled" else reason)
    assert sent.get("canceled", False) == (reason == "canceled")


def test_json_is_the_same_in_one_line_of_unicode() -> None:
    response = chat(said())
    assert json.loads(response.to_json()) == response.to_dict()
    assert "Héllo" in response.to_json()
    assert "\n" not in response.to_json()


def test_chat_chunks_are_what_openais_client_reads_and_joins() -> None:
    pieces = [
        ChunkChoice(index=0, delta=Delta(content="Hé", is_first=True), logprobs=logprobs(token("Hé"))),
        ChunkChoice(index=0, delta=Delta(content="llo")),
        ChunkChoice(index=0, delta=Delta(content=""), finish_reason="length"),
    ]
    chunks = [
        ChatCompletionChunkResponse(id="chatcmpl-1", created=1, model="m", choices=(piece,), usage=usage)
        for piece, usage in zip(pieces, (None, None, USAGE), strict=True)
    ]
    seen = [read(ChatCompletionChunk, chunk.to_dict()) for chunk in chunks]
    assert {chunk.object for chunk in seen} == {"chat.completion.chunk"}
    # Clients join strings, the role among them.
    assert "".join(chunk.choices[0].delta.role or "" for chunk in seen) == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == "Héllo"
    assert [chunk.choices[0].finish_reason for chunk in seen] == [None, None, "length"]
    assert [chunk.usage is None for chunk in seen] == [True, True, False]


def test_a_completion_is_what_openais_client_reads() -> None:
    likely = logprobs(
        token(" Once", top=(" Once", " Then")), token(" up"), token(b"\xe2\x98"), token(b"\x83"), token("")
    )
    seen = read(Completion, completion("Once up☃", likely).to_dict())
    choice = seen.choices[0]
    assert (seen.object, choice.text, choice.finish_reason) == ("text_completion", "Once up☃", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [" Once", " up", "bytes:\\xe2\\x98", "bytes:\\x83", ""]
    assert choice.logprobs.token_logprobs == [-0.5] * 5
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {" Once": 0.0, " Then": -1.0}
    # The leading space is no part of the text: offsets count the characters that are.
    assert choice.logprobs.text_offset == [0, 4, 7, 7, 8]


@pytest.mark.parametrize(
    ("parts", "text", "offsets"),
    [
        ((b"\xff", b"a", b"b"), "\ufffdab", [0, 1, 2]),
        ((b"\xe2", b"a", b"b"), "\ufffdab", [0, 1, 2]),
        ((b"a\xe2\x98", b"\xe2", b"\x98\x83b", b"", b"c"), "a\ufffd☃bc", [0, 2, 2, 4, 4]),
        ((b" \xf0\x9f", b"\x98", b"\x80\x80", b"x"), " \U0001f600\ufffdx", [0, 1, 1, 3]),
        ((b" \xff", b"a"), "\ufffda", [0, 1]),
        ((b"\xed", b"\xa0", b"x"), "\ufffd\ufffdx", [0, 1, 2]),
    ],
)
def test_offsets_count_what_stands_for_bytes_that_are_no_character(
    parts: tuple[bytes, ...], text: str, offsets: list[int]
) -> None:
    sent = completion(text, logprobs(*map(token, parts))).to_dict()
    assert sent["choices"][0]["logprobs"]["text_offset"] == offsets


def test_offsets_count_what_a_stop_string_has_cut_off() -> None:
    """As those of a stream do, whose tokens may come before that is known."""
    sent = completion("Once", logprobs(token("Once"), token(" up"), token(" on"))).to_dict()
    assert sent["choices"][0]["logprobs"]["text_offset"] == [0, 4, 7]


def test_completion_chunks_have_the_object_of_completions() -> None:
    def chunk(reason: FinishReason | None) -> dict[str, Any]:
        piece = CompletionChunkChoice(index=1, text="Once", finish_reason=reason, logprobs=logprobs(token("Once")))
        return CompletionChunkResponse(id="cmpl-1", created=1, model="m", choices=(piece,)).to_dict()

    seen = read(Completion, chunk("stop"))
    assert (seen.object, seen.choices[0].index, seen.choices[0].text) == ("text_completion", 1, "Once")
    # OpenAI's API sends null until a choice ends, though its client's type has no room for it.
    assert chunk(None)["choices"][0]["finish_reason"] is None


def test_impossible_tokens_have_a_finite_logprob() -> None:
    likely = logprobs(token("a", logprob=-math.inf))
    assert json.loads(chat(said(likely=likely)).to_json())["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert json.loads(completion("a", likely).to_json())["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_the_parts_have_a_wire_form_of_their_own() -> None:
    read(CompletionUsage, USAGE.to_dict())
    read(ChoiceLogprobs, logprobs(token("a", top=("b",))).to_dict())
    assert json.loads(USAGE.to_json())["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.anyio
async def test_what_a_model_says_is_what_openais_client_reads(model: Model) -> None:
    sampling = SamplingParams(max_len=12, n_choices=2, seed=1, top_n_logprobs=3, prompt_logprobs=1, ignore_eos=True)
    request = RequestBuilder().add_message("user", "Tell me about paging. ☃").with_sampling(sampling)
    whole = await model.send_chat_request(request)
    seen = read(ChatCompletion, whole.to_dict())
    assert [choice.message.content for choice in seen.choices] == [choice.message.content for choice in whole.choices]
    texts = ["", ""]
    roles = ["", ""]
    async for chunk in model.stream_chat_request(request):
        for choice in read(ChatCompletionChunk, chunk.to_dict()).choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]


@pytest.mark.anyio
async def test_offsets_of_a_models_completion_point_into_its_text() -> None:
    texts = ["Once, ü ☃ and 😀!", "There was"]
    async with fake_model(*texts) as model:
        response = await model.send_completion_request(["a", "b"], SamplingParams(top_n_logprobs=2))
    for text, choice in zip(texts, read(Completion, response.to_dict()).choices, strict=True):
        assert choice.text == text
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.text_offset is not None
        pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        shown = [(token, offset) for token, offset in pairs if len(token) == 1]  # no parts of characters, no end mark
        assert "".join(token for token, _ in shown) == "".join(filter(str.isascii, text))
        assert all(text[offset] == token for token, offset in shown)
