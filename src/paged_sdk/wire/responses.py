"""Maps OpenAI's responses API. Nothing is stored: a request holds its whole conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from attrs import define, evolve, field, frozen

from paged_sdk import (
    ChatCompletionResponse,
    Constraint,
    InvalidRequestError,
    Message,
    Model,
    RequestBuilder,
    ToolCall,
)
from paged_sdk.wire.body import BodyReader
from paged_sdk.wire.call import ChatCall
from paged_sdk.wire.count_tokens import CountTokensCall
from paged_sdk.wire.responses_answer import ItemWriter, response_of
from paged_sdk.wire.responses_body import (
    FunctionTool,
    InputBody,
    InputTokensBody,
    NamedFunction,
    ResponsesBody,
    TextConfig,
)
from paged_sdk.wire.responses_forms import RepeatedFields, WholeResponse
from paged_sdk.wire.sampling import read_sampling, with_answer_constraint

__all__ = ["INPUT_TOKENS", "RESPONSES", "ResponsesCall", "read_input_tokens", "read_responses"]

RESPONSES: Final = BodyReader(ResponsesBody)
INPUT_TOKENS: Final = BodyReader(InputTokensBody)
LOGPROBS: Final = "message.output_text.logprobs"


@frozen(kw_only=True)
class ResponsesCall(ChatCall):
    """Holds a parsed request.

    :ivar repeated: the fields of the request that the response repeats
    """

    repeated: RepeatedFields

    def with_defaults(self, model: Model) -> ResponsesCall:
        """Return the request with the model's temperature and top_p where it has none, for the response to repeat."""
        defaults, repeated = model.generation_defaults, self.repeated.copy()
        if repeated["temperature"] is None:
            repeated["temperature"] = 1.0 if defaults.temperature is None else defaults.temperature
        if repeated["top_p"] is None:
            repeated["top_p"] = 1.0 if defaults.top_p is None else defaults.top_p
        return evolve(self, repeated=repeated)

    def response(self, answer: ChatCompletionResponse) -> WholeResponse:
        """Return a whole answer in the form of OpenAI's API."""
        return response_of(answer, self.repeated, has_one_call=self.has_one_call)

    def writer(self) -> ItemWriter:
        """Return a writer of the answer's events."""
        return ItemWriter(self.repeated, has_one_call=self.has_one_call)


def read_responses(value: object) -> ResponsesCall:
    """Parse a body.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = RESPONSES.read(value)
    is_streamed = body.get("stream") or False
    if body.get("stream_options") is not None and not is_streamed:
        raise InvalidRequestError.of("stream_options", body["stream_options"], "null without stream")
    sampling = read_sampling(
        {"temperature": body.get("temperature"), "top_p": body.get("top_p")},
        max_len=body.get("max_output_tokens"),
        top_n=_top_n(body),
    )
    request = _request(body).with_sampling(sampling)
    return ResponsesCall(
        model=body["model"],
        request=request,
        repeated=_repeated(body),
        is_streamed=is_streamed,
        has_one_call=body.get("parallel_tool_calls") is False,
        label=body.get("safety_identifier") or body.get("user"),
    )


def read_input_tokens(value: object) -> CountTokensCall:
    """Parse a body of ``input_tokens``.

    :raises PagedError: the body is malformed, or asks for something unsupported
    """
    body = INPUT_TOKENS.read(value)
    return CountTokensCall(model=body["model"], request=_request(body), fields={"object": "response.input_tokens"})


def _request(body: InputBody) -> RequestBuilder:
    request = RequestBuilder.from_messages(_conversation(body))
    effort = (body.get("reasoning") or {}).get("effort")
    if effort == "none":
        request = request.with_enable_thinking(False)
    elif effort is not None:
        request = request.with_reasoning_effort(effort)
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools or choice is not None:
        request = request.with_tools([_tool(tool) for tool in tools or ()], _choice(choice))
    constraint = _constraint(body.get("text") or {})
    if constraint is not None:
        request = with_answer_constraint(request, constraint)
    return request.with_truncation() if body.get("truncation") == "auto" else request


def _repeated(body: ResponsesBody) -> RepeatedFields:
    """Return the fields of the request that a response repeats, with defaults for those that were not given."""
    text: TextConfig = body.get("text") or {}
    defaults: dict[str, Any] = {
        "background": False,
        "instructions": None,
        "frequency_penalty": 0,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": body["model"],
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    given = {key: each for key, each in body.items() if key in defaults and each is not None}
    repeated = {
        **defaults,
        **given,
        "tools": [
            {"description": None, "parameters": None, "strict": False, **tool} for tool in body.get("tools") or ()
        ],
        "service_tier": "default",
        "reasoning": {name: (body.get("reasoning") or {}).get(name) for name in ("effort", "summary")},
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
    }
    return cast(RepeatedFields, repeated)


def _top_n(body: ResponsesBody) -> int | None:
    top_n = body.get("top_logprobs")
    if LOGPROBS in (body.get("include") or ()):
        return top_n or 0
    if top_n:
        raise InvalidRequestError.of("top_logprobs", top_n, f'0 unless include has "{LOGPROBS}"')
    return None


def _constraint(text: TextConfig) -> Constraint | None:
    form = text.get("format")
    if form is None or form["type"] == "text":
        return None
    return Constraint.json_schema({"type": "object"} if form["type"] == "json_object" else form["schema"])


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _choice(choice: Literal["auto", "none", "required"] | NamedFunction | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {"type": "function", "function": {"name": choice["name"]}}


def _conversation(body: InputBody) -> list[Message]:
    messages = _Messages()
    instructions, given = body.get("instructions"), body["input"]
    if instructions:
        messages.add(Message("system", instructions))
    if isinstance(given, str):
        messages.add(Message("user", given))
    else:
        for place, item in enumerate(given):
            messages.take(item, f"input[{place}]")
    return messages.all()


@define
class _Messages:
    """Builds messages from items: consecutive reasoning, text and calls of the model become one assistant message."""

    _messages: list[Message] = field(factory=list)
    _thoughts: list[str] = field(factory=list)
    _texts: list[str] = field(factory=list)
    _calls: list[ToolCall] = field(factory=list)

    def add(self, message: Message) -> None:
        """Add a message of another role than the model's."""
        self._end_turn()
        self._messages.append(message)

    def all(self) -> list[Message]:
        """Return the messages."""
        self._end_turn()
        return self._messages

    def take(self, item: Mapping[str, Any], at: str) -> None:
        """Take the next item.

        :param at: the item's path in the body, for errors
        """
        kind = item.get("type", "message")
        if kind == "reasoning":
            if self._texts or self._calls:
                self._end_turn()
            self._thoughts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
        elif kind == "function_call":
            arguments = _arguments(item["arguments"], f"{at}.arguments")
            self._calls.append(ToolCall(item["name"], arguments, item["call_id"]))
        elif kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "".join(part["text"] for part in output)
            self.add(Message("tool", text, tool_call_id=item["call_id"]))
        elif item["role"] == "assistant":
            if self._texts or self._calls:
                self._end_turn()
            self._texts.append(_text(item["content"], f"{at}.content"))
        else:
            content = item["content"]
            if item.get("phase") is not None:
                raise InvalidRequestError.of(
                    f"{at}.phase", item["phase"], "null: only the model's messages have phases"
                )
            self.add(Message.of_parts(item["role"], content if isinstance(content, str) else _parts(content)))

    def _end_turn(self) -> None:
        thoughts, text = "".join(self._thoughts), "".join(self._texts)
        if thoughts or self._texts or self._calls:
            turn = Message("assistant", text, tool_calls=self._calls, reasoning_content=thoughts or None)
            self._messages.append(turn)
        self._thoughts, self._texts, self._calls = [], [], []


def _arguments(text: str, at: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False).encode()  # refuses lone surrogates
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError.of(at, text, "JSON of an object")
    return arguments


def _text(parts: str | list[dict[str, Any]], at: str) -> str:
    if isinstance(parts, str):
        return parts
    for place, part in enumerate(parts):
        if part["type"] == "input_image":
            raise InvalidRequestError.of(f"{at}[{place}].type", part["type"], '"output_text" in the model\'s messages')
    return "".join(part["text"] for part in parts)


def _parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["text"]}
        for part in parts
    ]
