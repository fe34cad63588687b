"""Maps OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required, TypeAlias, TypedDict

from attrs import field, frozen

from paged_sdk import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Constraint,
    InvalidRequestError,
    RequestBuilder,
)
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.cache_control import CacheControl
from paged_sdk.wire.call import ChatCall, event
from paged_sdk.wire.problem import Problem, openai_error
from paged_sdk.wire.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingFields,
    constraint_of,
    read_sampling,
    top_n_logprobs,
    with_answer_constraint,
)
from paged_sdk.wire.shown_calls import ShownCalls

__all__ = [
    "CHAT_COMPLETION",
    "CacheOptions",
    "ChatCompletionCall",
    "ImageDetail",
    "JsonObjectFormat",
    "StreamOptions",
    "TextFormat",
    "chunk_events",
    "includes_usage",
    "read_chat_completion",
]


ImageDetail: TypeAlias = Literal["auto", "low", "high", "original"]


class StreamOptions(TypedDict, total=False):
    """Sets what a stream holds beside the answer."""

    include_usage: Annotated[bool | None, "Whether a chunk with the usage comes last."]
    include_obfuscation: Annotated[Literal[False] | None, "there is none"]


class JsonSchema(TypedDict, total=False):
    """Holds a JSON schema that the answer must match."""

    name: Required[str]
    schema: Required[dict[str, Any]]
    strict: Annotated[bool | None, "The schema is enforced either way."]
    description: Annotated[str | None, "Has no effect: the model is not told of the schema."]


class TextFormat(TypedDict):
    """Asks for any text."""

    type: Literal["text"]


class JsonObjectFormat(TypedDict):
    """Asks for a JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(TypedDict):
    """Asks for JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FunctionName(TypedDict):
    """Names a function."""

    name: str


class NamedTool(TypedDict):
    """Names a tool."""

    type: Literal["function"]
    function: FunctionName


class TextPart(TypedDict):
    """Holds a text of a prediction."""

    type: Literal["text"]
    text: str


class ImageUrl(TypedDict, total=False):
    """Holds an image's URL."""

    url: Required[str]
    detail: Annotated[ImageDetail | None, "Has no effect: images are seen as the model does."]


class MessageText(TypedDict, total=False):
    """Holds a text within a message."""

    type: Required[Literal["text"]]
    text: Required[str]
    cache_control: Annotated[CacheControl | None, "Extension."]


class MessageImage(TypedDict, total=False):
    """Holds an image within a message."""

    type: Required[Literal["image_url"]]
    image_url: Required[ImageUrl]
    cache_control: Annotated[CacheControl | None, "Extension."]


class Parts(TypedDict):
    """Holds the parts of a message."""

    content: list[MessageText | MessageImage]


class PredictedContent(TypedDict):
    """Predicts the answer, for speculative decoding."""

    type: Literal["content"]
    content: str | list[TextPart]


class CacheOptions(TypedDict, total=False):
    """Sets how prefixes are cached."""

    mode: Annotated[Literal["implicit"] | None, "every prefix is cached"]


class TemplateArguments(TypedDict, total=False):
    """Holds variables for the chat template."""

    enable_thinking: bool | None


class ChatCompletionBody(SamplingFields, total=False):
    """Describes the body of ``/v1/chat/completions``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    messages: Required[Annotated[list[dict[str, Any]], Bounds(1), "The conversation so far."]]
    stream: Annotated[bool | None, "Whether to stream the answer."]
    stream_options: StreamOptions | None
    max_completion_tokens: Annotated[int | None, Bounds(1), "Maximum number of tokens to generate."]
    logprobs: Annotated[bool | None, "Whether to return each token's logprob."]
    top_logprobs: Annotated[
        int | None, Bounds(0, MAX_TOP_LOGPROBS), "How many of the likeliest tokens to return with each."
    ]
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None
    tools: Annotated[list[dict[str, Any]] | None, "Functions that the model may call."]
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool | None, "Whether the model calls a tool, and which one."
    ]
    parallel_tool_calls: Annotated[bool | None, "False: at most one call."]
    prediction: Annotated[PredictedContent | None, "The expected answer, which makes it faster."]
    reasoning_effort: Annotated[str | None, "Passed to the chat template; none: no reasoning."]
    enable_thinking: Annotated[bool | None, "Extension: passed to the chat template."]
    chat_template_kwargs: Annotated[TemplateArguments | None, "Extension: the same."]
    thinking_budget: Annotated[int | None, Bounds(1), "Extension: tokens after which reasoning ends."]
    continue_final_message: Annotated[bool | None, "Extension: whether to continue the last message, the assistant's."]
    add_generation_prompt: Annotated[bool | None, "Extension: the opposite of continue_final_message."]
    prompt_logprobs: Annotated[int | None, Bounds(0, 20), "Extension: logprobs of the prompt's tokens."]
    safety_identifier: Annotated[str | None, "A label for the end user, for the server's log."]
    prompt_cache_key: Annotated[str | None, "A group of similar prompts; all groups share one cache."]
    prompt_cache_options: CacheOptions | None
    prompt_cache_retention: Annotated[Literal["in_memory"] | None, "prefixes are kept in memory"]
    metadata: Annotated[None, "no answers are stored"]
    store: Annotated[Literal[False] | None, "no answers are stored"]
    service_tier: Annotated[Literal["auto", "default"] | None, "there is one tier"]
    modalities: Annotated[list[Literal["text"]] | None, "Answers are texts."]
    verbosity: Annotated[Literal["medium"] | None, "say it in a message"]
    audio: Annotated[None, "answers are texts"]
    moderation: Annotated[None, "nothing is moderated"]
    web_search_options: Annotated[None, "there is no search"]
    functions: Annotated[None, "use tools"]
    function_call: Annotated[None, "use tool_choice"]


CHAT_COMPLETION: Final = BodyReader(ChatCompletionBody)
_PARTS: Final = BodyReader(Parts)


@frozen(kw_only=True)
class ChatCompletionCall(ChatCall):
    """Holds a parsed request."""

    includes_usage: bool = False

    def response(self, answer: ChatCompletionResponse) -> dict[str, Any]:
        """Return a whole answer in the form of OpenAI's API."""
        body = {**answer.to_dict(), "model": self.model}
        if self.has_one_call:
            for choice in body["choices"]:
                _replace_calls(choice["message"], choice["message"].get("tool_calls", [])[:1])
        return body

    def writer(self) -> _ChunkWriter:
        """Return a writer of the answer's events."""
        return _ChunkWriter(self)


@frozen
class _ChunkWriter:
    """Writes an answer as chunks."""

    call: ChatCompletionCall
    _calls: dict[int, ShownCalls] = field(factory=dict)

    def begin(self, answer: ChatCompletionResponse) -> str:
        return ""

    def chunk(self, chunk: ChatCompletionChunkResponse) -> str:
        body = {**chunk.to_dict(), "model": self.call.model}
        if self.call.has_one_call:
            for choice, written in zip(chunk.choices, body["choices"], strict=True):
                calls = self._calls.setdefault(choice.index, ShownCalls(has_one_call=True))
                _replace_calls(written["delta"], [call.to_dict() for call in calls.shown(choice.delta)])
        return chunk_events(body, includes_usage=self.call.includes_usage)

    def end(self, answer: ChatCompletionResponse) -> str:
        return "data: [DONE]\n\n"

    def failed(self, problem: Problem) -> str:
        return event(openai_error(problem))


def chunk_events(body: dict[str, Any], *, includes_usage: bool) -> str:
    """Write a chunk's events; its usage, if requested, becomes a chunk of its own."""
    usage = body.pop("usage")
    if not includes_usage:
        return event(body) if body["choices"] else ""
    events = event({**body, "usage": None}) if body["choices"] else ""
    return events if usage is None else events + event({**body, "choices": [], "usage": usage})


def _replace_calls(message: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """Replace the tool calls of a message, or of a delta, by these."""
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls


def read_chat_completion(value: object) -> ChatCompletionCall:
    """Parse a body.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = CHAT_COMPLETION.read(value)
    is_streamed = body.get("stream") or False
    if is_streamed and body.get("prompt_logprobs") is not None:
        raise InvalidRequestError.of("prompt_logprobs", body["prompt_logprobs"], "null in a stream")
    top_n = top_n_logprobs(body.get("logprobs") or False, body.get("top_logprobs"), default=0)
    sampling = read_sampling(body, max_len=_max_len(body), top_n=top_n, prompt_logprobs=body.get("prompt_logprobs"))
    request = RequestBuilder.from_messages(_messages(body["messages"])).with_sampling(sampling)
    request = _with_thinking(request, body)
    if _continues_final_message(body):
        request = request.with_continue_final_message()
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools or choice is not None:
        request = request.with_tools(tools or (), choice or "auto")
    constraint = _constraint(body)
    if constraint is not None:
        if request.options.shown_tools and constraint.kind != "json_schema":
            allowed = 'a JSON schema beside tools that may be called: give tool_choice "none", or no tools'
            raise InvalidRequestError.of("grammar", body.get("grammar"), allowed)
        request = with_answer_constraint(request, constraint)
    prediction, salt = body.get("prediction"), body.get("cache_salt")
    if prediction is not None:
        request = request.with_prediction(prediction)
    if salt is not None:
        request = request.with_cache_salt(salt)
    if body.get("truncate_sequence"):
        request = request.with_truncation()
    return ChatCompletionCall(
        model=body["model"],
        request=request,
        is_streamed=is_streamed,
        includes_usage=includes_usage(body.get("stream_options"), is_streamed=is_streamed),
        has_one_call=body.get("parallel_tool_calls") is False,
        label=body.get("safety_identifier") or body.get("user"),
        names={"response_format": _constraint_field(body)},
    )


def includes_usage(options: StreamOptions | None, *, is_streamed: bool) -> bool:
    """Tell whether a stream's last chunk holds the usage.

    :raises InvalidRequestError: options without a stream
    """
    if options is not None and not is_streamed:
        raise InvalidRequestError.of("stream_options", options, "null without stream")
    return bool((options or {}).get("include_usage"))


def _max_len(body: ChatCompletionBody) -> int | None:
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequestError.of("max_tokens", old, f"max_completion_tokens = {new} alone: it is the newer name")
    return old if new is None else new


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            _PARTS.read({"content": content}, at=f"messages[{place}]")
    return list(map(_with_reasoning, messages))


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under the name that the SDK knows: some clients call it ``reasoning``."""
    thought = message.get("reasoning")
    if not isinstance(thought, str) or message.get("reasoning_content") not in (None, "", thought):
        return message  # refused where it is parsed, if it has a value
    rest = {name: value for name, value in message.items() if name != "reasoning"}
    return {**rest, "reasoning_content": thought}


def _continues_final_message(body: ChatCompletionBody) -> bool:
    continues, opens = body.get("continue_final_message") or False, body.get("add_generation_prompt")
    if opens is not None and opens is continues:
        raise InvalidRequestError.of(
            "add_generation_prompt", opens, f"{not opens} beside what continue_final_message says"
        )
    return continues


def _with_thinking(request: RequestBuilder, body: ChatCompletionBody) -> RequestBuilder:
    arguments = body.get("chat_template_kwargs") or {}
    given = [body.get("enable_thinking"), arguments.get("enable_thinking")]
    effort = body.get("reasoning_effort")
    said = {value for value in given if value is not None} | ({False} if effort == "none" else set())
    if len(said) > 1:
        raise InvalidRequestError.of(
            "enable_thinking", True, "the same as reasoning_effort and chat_template_kwargs say"
        )
    for enable in said:
        request = request.with_enable_thinking(enable)
    budget = body.get("thinking_budget")
    if budget is not None:
        request = request.with_thinking_budget(budget)
    return request if effort in (None, "none") else request.with_reasoning_effort(effort)


def _constraint_field(body: ChatCompletionBody) -> str:
    return "response_format" if body.get("grammar") is None else "grammar"


def _constraint(body: ChatCompletionBody) -> Constraint | None:
    grammar, format_ = body.get("grammar"), body.get("response_format")
    if grammar is not None:
        if format_ is not None and format_["type"] != "text":
            raise InvalidRequestError.of("grammar", grammar, "null beside response_format")
        return constraint_of(grammar["type"], grammar["value"], field="grammar.type")
    if format_ is None or format_["type"] == "text":
        return None
    if format_["type"] == "json_object":
        return Constraint.json_schema({"type": "object"})
    return Constraint.json_schema(format_["json_schema"]["schema"])
