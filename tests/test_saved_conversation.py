"""A conversation is the same once it was written to a file, and what is no such file is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_sdk import (
    ConfigError,
    Conversation,
    DryParams,
    Image,
    Message,
    SamplingParams,
    ToolCall,
    VisionMessages,
)
from paged_sdk.system.files import MAX_TEXT_BYTES
from paged_sdk.testing import fake_model

pytestmark = pytest.mark.anyio

texts = st.text(max_size=20).filter(lambda text: text.isprintable() or "\n" in text)
names = st.text(min_size=1, max_size=8)
numbers = st.one_of(
    st.booleans(), st.none(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    st.one_of(numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
)
images = st.one_of(
    st.builds(Image, st.binary(min_size=1, max_size=40)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4])).map(
        lambda shape: Image(bytes(math.prod(shape)), shape)
    ),
)
calls = st.builds(
    ToolCall, names, st.one_of(texts, st.dictionaries(texts, values, max_size=3)), st.one_of(st.none(), names)
)


def of_parts(role: str, parts: list[str | Image], **rest: Any) -> Message:
    return Message(role, "".join(part for part in parts if isinstance(part, str)), parts=tuple(parts), **rest)


optional_names = st.one_of(st.none(), names)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer", "user"]), texts, name=optional_names),
    st.builds(of_parts, st.just("user"), st.lists(st.one_of(texts, images), max_size=4), name=optional_names),
    st.builds(
        Message,
        st.just("assistant"),
        texts,
        tool_calls=st.lists(calls, max_size=2),
        reasoning_content=optional_names,
        name=optional_names,
    ),
    st.builds(Message, st.just("tool"), texts, tool_call_id=optional_names, name=optional_names),
)
fractions = st.one_of(st.none(), st.floats(0.01, 1))
samplings = st.builds(
    SamplingParams,
    temperature=st.one_of(st.none(), st.floats(0, 5)),
    top_k=st.one_of(st.none(), st.integers(-1, 100)),
    top_p=fractions,
    min_p=fractions,
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=fractions,
    max_len=st.one_of(st.none(), st.integers(9, 100)),
    stop=st.lists(names, max_size=2),
    ignore_eos=st.booleans(),
    logits_bias=st.one_of(
        st.none(),
        st.dictionaries(st.integers(0, 2**31 - 1), st.one_of(st.floats(-5, 5), st.just(-math.inf)), max_size=3),
    ),
    n_choices=st.integers(1, 3),
    top_n_logprobs=st.one_of(st.none(), st.integers(0, 9)),
    seed=st.one_of(st.none(), st.integers(0, 2**63)),
    dry_params=st.one_of(
        st.none(),
        st.builds(
            DryParams, multiplier=st.floats(0, 2), base=st.floats(1, 3), sequence_breakers=st.lists(names, max_size=2)
        ),
    ),
    stop_token_ids=st.lists(st.integers(0, 1000), max_size=3),
    min_tokens=st.integers(0, 9),
    prompt_logprobs=st.one_of(st.none(), st.integers(0, 9)),
)


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"fine in {city}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "chat.json"


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    turns=st.lists(messages, max_size=4),
    sampling=st.one_of(st.none(), samplings),
    with_tools=st.booleans(),
    max_rounds=st.integers(1, 9),
    seconds=st.one_of(st.none(), st.floats(0.1, 100), st.integers(1, 100)),
)
def test_what_is_read_is_what_was_written(
    file: Path,
    turns: list[Message],
    sampling: SamplingParams | None,
    with_tools: bool,
    max_rounds: int,
    seconds: float | None,
) -> None:
    model: Any = None  # neither side asks it anything
    tools = [weather] if with_tools else []
    chat = Conversation(
        model, messages=turns, sampling=sampling, tools=tools, max_rounds=max_rounds, tool_timeout=seconds
    )
    chat.save(file)
    read = Conversation.load(model, file, tools=tools)
    assert read.messages == chat.messages == tuple(turns)
    assert read._sampling == sampling
    assert (read._tools, read._max_rounds, read._tool_timeout) == (chat._tools, max_rounds, seconds)
    before = file.read_bytes()
    read.save(file)
    assert file.read_bytes() == before


async def test_a_conversation_goes_on_where_it_was_saved(file: Path) -> None:
    async with fake_model("Hello!", "Fine.") as model:
        chat = Conversation(model, system="Be brief.", sampling=SamplingParams(max_len=20))
        await chat.send("Hi!")
        chat.save(file)
        await chat.send("Forgotten?")
        chat = Conversation.load(model, file)
        await chat.send("How are you?")
        assert [message.content for message in chat.messages] == ["Be brief.", "Hi!", "Hello!", "How are you?", "Fine."]
        assert model.requests[-1].options.sampling == SamplingParams(max_len=20)
        assert [message.content for message in model.requests[-1].messages][:3] == ["Be brief.", "Hi!", "Hello!"]


def test_a_file_is_replaced_and_nothing_is_left_beside_it(file: Path) -> None:
    model: Any = None
    for content in ("first", "second"):
        Conversation(model, system=content).save(file)
    assert Conversation.load(model, str(file)).messages[0].content == "second"
    assert [path.name for path in file.parent.iterdir()] == ["chat.json"]


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = None
    Conversation(model, system="first").save(file)

    def fail(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", fail)
        with pytest.raises(ConfigError, match=r"path = .*can be written.*No space left") as caught:
            Conversation(model, system="second").save(file)
    assert (caught.value.setting, caught.value.value) == ("path", str(file))
    assert Conversation.load(model, file).messages[0].content == "first"
    assert [path.name for path in file.parent.iterdir()] == ["chat.json"]
    for path in (file.parent, file.parent / "nowhere" / "chat.json"):
        with pytest.raises(ConfigError, match="path = "):
            Conversation(model).save(path)


def test_a_conversation_too_long_to_be_read_is_not_written(file: Path) -> None:
    model: Any = None
    messages = VisionMessages().add_image_message("user", "What is it?", [bytes(MAX_TEXT_BYTES // 4 * 3)])
    with pytest.raises(ConfigError, match=f"at most {MAX_TEXT_BYTES} bytes"):
        Conversation(model, messages=messages).save(file)
    assert not file.exists()


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another file": (lambda content: content.pop("format"), "format = None"),
    "a later version": (lambda content: content.update(version=2), "version = 2 .*expected 1,"),
    "a missing key": (lambda content: content.pop("sampling"), "sampling = None .*the key is missing"),
    "an unknown key": (lambda content: content.update(color="red"), "color.* = 'red' .*no key but format, version"),
    "messages": (lambda content: content.update(messages={}), "messages = {} .*a list"),
    "a message": (lambda content: content["messages"].append("Hi!"), r"messages\[3\]: message = 'Hi!'"),
    "a role": (lambda content: content["messages"][1].update(role="king"), r"messages\[1\]: role = 'king' .*'system'"),
    "a text": (lambda content: content["messages"][1].update(content=5), r"messages\[1\]: content = 5"),
    "a part": (
        lambda content: content["messages"][2].update(content=[{"type": "sound"}]),
        r"messages\[2\]\.content\[0\]",
    ),
    "an image": (
        lambda content: content["messages"][2]["content"][0].update(data="?"),
        r"messages\[2\]\.content\[0\]\.data = '\?' .*base64",
    ),
    "a shape": (
        lambda content: content["messages"][2]["content"][0].update(shape=[1, 2]),
        r"messages\[2\]\.content\[0\]: shape = .*height, width and channels",
    ),
    "a temperature": (
        lambda content: content["sampling"].update(temperature="hot"),
        r"sampling: SamplingParams\.temperature = 'hot'",
    ),
    "an unknown setting": (lambda content: content["sampling"].update(heat=1), r"sampling\.'heat' = 1 .*temperature"),
    "a bias": (lambda content: content["sampling"].update(logits_bias={"x": 1}), r"sampling\.logits_bias = "),
    "breakers": (
        lambda content: content["sampling"].update(dry_params={"sequence_breakers": 5}),
        r"sampling\.dry_params: DryParams",
    ),
    "rounds": (lambda content: content.update(max_rounds=0), "max_rounds = 0 .*an int >= 1"),
    "seconds": (lambda content: content.update(tool_timeout=-1), "tool_timeout = -1 .*seconds > 0"),
    "tools": (lambda content: content.update(tools=[weather.__name__, 3]), r"tools\[1\] = 3"),
    "tools that were not given": (lambda content: content.update(tools=["weather"]), r"tools = .*'weather' missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_conversation_is_refused_with_the_file_and_the_place(what: str, file: Path) -> None:
    model: Any = None
    messages = VisionMessages().add_message("system", "Be brief.").add_message("user", "Hi!")
    messages = messages.add_image_message("user", "And this?", [b"an image"])
    Conversation(model, messages=messages, sampling=SamplingParams()).save(file)
    change, match = REFUSED[what]
    changed(file, change)
    with pytest.raises(ConfigError, match=match) as caught:
        Conversation.load(model, file)
    assert str(file) in str(caught.value)
    assert caught.value.allowed


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"a": "\\ud800"}', b""])
def test_what_is_no_json_object_is_refused(content: bytes, file: Path) -> None:
    model: Any = None
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"path = .*{file.name}"):
        Conversation.load(model, file)
    with pytest.raises(ConfigError, match="No such file"):
        Conversation.load(model, file.parent / "other.json")


@settings(
    derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(file: Path, data: st.DataObject) -> None:
    model: Any = None
    turns = [
        Message("user", "Hi!"),
        of_parts("user", ["a", Image(b"b")]),
        Message("assistant", "", tool_calls=[ToolCall("f", {})]),
    ]
    Conversation(model, messages=turns, sampling=SamplingParams(dry_params=DryParams(), logits_bias={7: 1.0})).save(
        file
    )

    def change(content: Any) -> None:
        while True:
            key = data.draw(st.sampled_from(sorted(content) if isinstance(content, dict) else range(len(content))))
            if not (isinstance(content[key], dict | list) and content[key]) or data.draw(st.booleans()):
                content[key] = data.draw(values)
                return
            content = content[key]

    changed(file, change)
    try:
        Conversation.load(model, file)
    except ConfigError as error:
        assert str(file) in str(error)
