"""Every official client, in every way that it can be asked, with everything that answers can be."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import openai
import pytest
from attrs import frozen
from PIL import Image
from pydantic import BaseModel

from paged_sdk import VisionModelBuilder
from paged_sdk.testing import FakeRequest, fake_model
from serving import Serving, serving
from tiny_vision import make_vision_checkpoint, picture

CITY: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SEEING: Final[dict[str, Any]] = {"model": "seeing", "extra_body": {"temperature": 0}}
LETTER: Final[dict[str, Any]] = {"type": "json_schema", "schema": {"enum": list("abcdefghijklmnopqrstuvwxyz")}}
"""What is seen, in an answer that ends: the clients' helpers take no others."""


class Place(BaseModel):
    name: str


def reply(request: FakeRequest) -> str:
    if request.options.shown_tools:
        return '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    return '{"name": "Oslo"}' if request.options.constraint is not None else "Hello!"


def image() -> str:
    written = io.BytesIO()
    Image.fromarray(picture(28, 28, seed=1)).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


@frozen
class Chat:
    """Is OpenAI's chat completions."""

    def client(self, served: Serving, *, is_async: bool) -> Any:
        kind = openai.AsyncOpenAI if is_async else openai.OpenAI
        return kind(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)

    def fields(self, feature: str) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi!"}]}
        match feature:
            case "tools":
                asked["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
            case "structured":
                asked["response_format"] = Place
            case "images":
                part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image()}"}}
                form = {"type": "json_schema", "json_schema": {"name": "letter", "schema": LETTER["schema"]}}
                asked |= SEEING | {"messages": [{"role": "user", "content": [part]}], "response_format": form}
        return asked

    def whole(self, client: Any, feature: str) -> Any:
        chats = client.chat.completions
        return (chats.parse if feature == "structured" else chats.create)(**self.fields(feature))

    def stream(self, client: Any, feature: str) -> Any:
        return client.chat.completions.stream(**self.fields(feature))

    def final(self, stream: Any) -> Any:
        return stream.get_final_completion()

    def found(self, answer: Any, feature: str) -> Any:
        message = answer.choices[0].message
        if feature == "tools":
            return message.tool_calls[0].function.name, json.loads(message.tool_calls[0].function.arguments)
        return message.parsed if feature == "structured" else message.content


@frozen
class Responses(Chat):
    """Is OpenAI's responses."""

    def fields(self, feature: str) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "fake", "input": "Hi!"}
        match feature:
            case "tools":
                asked["tools"] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]
            case "structured":
                asked["text_format"] = Place
            case "images":
                part = {"type": "input_image", "image_url": f"data:image/png;base64,{image()}", "detail": "auto"}
                text = {"format": {"name": "letter", **LETTER}}
                asked |= SEEING | {"input": [{"role": "user", "content": [part]}], "text": text}
        return asked

    def whole(self, client: Any, feature: str) -> Any:
        return (client.responses.parse if feature == "structured" else client.responses.create)(**self.fields(feature))

    def stream(self, client: Any, feature: str) -> Any:
        return client.responses.stream(**self.fields(feature))

    def final(self, stream: Any) -> Any:
        return stream.get_final_response()

    def found(self, answer: Any, feature: str) -> Any:
        if feature == "tools":
            return answer.output[0].name, json.loads(answer.output[0].arguments)
        return answer.output_parsed if feature == "structured" else answer.output_text


@frozen
class Messages(Chat):
    """Is Anthropic's messages."""

    def client(self, served: Serving, *, is_async: bool) -> Any:
        kind = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
        return kind(base_url=served.url, api_key="none", max_retries=0, timeout=60)

    def fields(self, feature: str) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 99}
        match feature:
            case "tools":
                asked["tools"] = [{"name": "weather", "input_schema": CITY}]
            case "structured":
                asked["output_format"] = Place
            case "images":
                source = {"type": "base64", "media_type": "image/png", "data": image()}
                content = [{"type": "image", "source": source}]
                asked |= SEEING | {
                    "messages": [{"role": "user", "content": content}],
                    "output_config": {"format": LETTER},
                }
        return asked

    def whole(self, client: Any, feature: str) -> Any:
        return (client.messages.parse if feature == "structured" else client.messages.create)(**self.fields(feature))

    def stream(self, client: Any, feature: str) -> Any:
        return client.messages.stream(**self.fields(feature))

    def final(self, stream: Any) -> Any:
        return stream.get_final_message()

    def found(self, answer: Any, feature: str) -> Any:
        if feature == "tools":
            return answer.content[0].name, answer.content[0].input
        return answer.parsed_output if feature == "structured" else answer.content[0].text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("llava")
    make_vision_checkpoint("llava", path)
    seeing = VisionModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    with serving({"fake": lambda: fake_model(reply), "seeing": seeing.build}) as served:
        yield served


@pytest.fixture(scope="module")
def seen(served: Serving) -> str:
    """Return what the model says of the image."""
    body = {**Chat().fields("images"), "temperature": 0}
    del body["extra_body"]
    return str(served.post(**body).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("feature", ["text", "tools", "structured", "images"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("api", [Chat(), Responses(), Messages()], ids=["chat", "responses", "messages"])
def test_clients(served: Serving, seen: str, api: Chat, is_async: bool, is_streamed: bool, feature: str) -> None:
    expected = {"text": "Hello!", "tools": ("weather", {"city": "Oslo"}), "structured": Place(name="Oslo")}
    if is_async:
        answer = asyncio.run(_ask(served, api, feature, is_streamed=is_streamed))
    else:
        with api.client(served, is_async=False) as client:
            if is_streamed:
                with api.stream(client, feature) as stream:
                    answer = api.final(stream)
            else:
                answer = api.whole(client, feature)
    assert api.found(answer, feature) == expected.get(feature, seen)


async def _ask(served: Serving, api: Chat, feature: str, *, is_streamed: bool) -> Any:
    async with api.client(served, is_async=True) as client:
        if not is_streamed:
            return await api.whole(client, feature)
        async with api.stream(client, feature) as stream:
            return await api.final(stream)
