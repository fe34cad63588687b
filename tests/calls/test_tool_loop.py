"""Tools that a model calls are run, and what they return goes back to it, until it answers."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import json
import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import pydantic
import pytest

from paged_sdk import (
    BlockingModel,
    Conversation,
    InvalidRequestError,
    Message,
    ModelClosedError,
    RequestBuilder,
    SamplingParams,
    Tool,
    ToolError,
    ToolRoundsError,
)
from paged_sdk.testing import fake_model
from paged_sdk.testing.fake_model import FakeRequest
from paged_sdk.types.function_arguments import bind_arguments
from tool_types import Place, Span, Unit

ASK: Final = RequestBuilder().add_message("user", "How warm is it?")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def weather(city: str, days: int = 1) -> str:
    return f"{days} times 20 degrees in {city}"


async def cities() -> list[str]:
    await anyio.lowlevel.checkpoint()
    return ["Łódź", "Paris"]


def answers_of(request: FakeRequest) -> list[tuple[str | None, str]]:
    """Return what tools have said since the model's last turn."""
    last = max(place for place, message in enumerate(request.messages) if message.role.value != "tool")
    return [(message.name, message.content) for message in request.messages[last + 1 :]]


@pytest.mark.anyio
async def test_tools_run_until_the_model_answers() -> None:
    async with fake_model(
        f"<think>Where?</think>First: {call('cities')}",
        f"{call('weather', city='Łódź')}{call('weather', city='Paris', days=2)}",
        "It is warm.",
    ) as model:
        run = await model.send_chat_with_tools(ASK.with_tools([weather, cities]))
        assert run.response.choices[0].message.content == "It is warm."
        assert [response.choices[0].finish_reason for response in run.responses] == ["tool_calls", "tool_calls", "stop"]
        assert [message.role.value for message in run.messages] == [
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
            "assistant",
        ]
        assert run.messages[0].reasoning_content == "Where?"
        ids = [each.id for each in run.messages[2].tool_calls]
        assert [message.tool_call_id for message in run.messages[3:5]] == ids
        assert answers_of(model.requests[1]) == [("cities", '["Łódź", "Paris"]')]
        assert answers_of(model.requests[2]) == [
            ("weather", "1 times 20 degrees in Łódź"),
            ("weather", "2 times 20 degrees in Paris"),
        ]
        assert model.requests[2].messages == (*ASK.messages, *run.messages[:5])


@pytest.mark.anyio
async def test_an_answer_without_calls_is_the_run() -> None:
    async with fake_model("Hello.") as model:
        run = await model.send_chat_with_tools(ASK.with_tools([weather]))
        assert run.messages == (Message("assistant", "Hello."),)
        assert (await model.send_chat_with_tools(ASK)).response.choices[0].message.content == "Hello."


@pytest.mark.anyio
async def test_calls_of_an_answer_that_is_cut_off_are_not_run() -> None:
    ran: list[str] = []

    def weather(city: str) -> str:
        ran.append(city)
        return "20 degrees"

    said = call("weather", city="Paris")
    async with fake_model(said + "Hello!" * 1500, delay=0.001) as model, anyio.create_task_group() as tasks:

        async def close_soon() -> None:
            while model.stats().completion_tokens <= len(said):
                await anyio.sleep(0.001)
            await model.aclose()

        tasks.start_soon(close_soon)
        run = await model.send_chat_with_tools(ASK.with_tools([weather]))
        assert run.response.choices[0].finish_reason == "canceled"
        assert [each.function.name for each in run.response.choices[0].message.tool_calls] == ["weather"]
        assert ran == []


@pytest.mark.anyio
async def test_calls_of_one_answer_run_at_once_and_sync_ones_in_threads() -> None:
    both_are_there = threading.Barrier(2, timeout=10)
    told: contextvars.ContextVar[str] = contextvars.ContextVar("told")
    told.set("yes")

    def meet() -> str:
        both_are_there.wait()
        return f"{threading.current_thread() is threading.main_thread()} {told.get()}"

    async with fake_model(call("meet") * 2, "Done.") as model:
        await model.send_chat_with_tools(ASK.with_tools([meet]))
        assert answers_of(model.requests[1]) == [("meet", "False yes")] * 2


@pytest.mark.anyio
async def test_tools_that_hang_take_no_thread_from_others() -> None:
    go_on = threading.Event()

    def hang() -> str:
        go_on.wait(60)
        return "late"

    limiter = anyio.to_thread.current_default_thread_limiter()
    usual, limiter.total_tokens = limiter.total_tokens, 1
    async with fake_model(call("hang") * 2, "Done.") as model:
        try:
            with anyio.fail_after(30):
                await model.send_chat_with_tools(ASK.with_tools([hang]), tool_timeout=0.01)
                assert await anyio.to_thread.run_sync(lambda: "here") == "here"
        finally:
            go_on.set()
            limiter.total_tokens = usual
        told = ("hang", "Error: TimeoutError: it did not return within 0.01 seconds")
        assert answers_of(model.requests[1]) == [told] * 2


def fails(city: str) -> str:
    raise RuntimeError(f"no {city}")


@pytest.mark.anyio
async def test_an_exception_is_told_to_the_model_or_ends_the_run() -> None:
    said = f"{call('fails', city='Rome')}{call('weather', city='Rome')}"
    async with fake_model(said, "Sorry.", said) as model:
        request = ASK.with_tools([fails, weather])
        await model.send_chat_with_tools(request)
        assert answers_of(model.requests[1]) == [
            ("fails", "Error: RuntimeError: no Rome"),
            ("weather", "1 times 20 degrees in Rome"),
        ]
        with pytest.raises(ToolError, match=r"fails raised RuntimeError\('no Rome'\)") as caught:
            await model.send_chat_with_tools(request, on_error="raise")
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert caught.value.tool == "fails"
        assert caught.value.partial_response is not None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_tool_that_awaits_what_was_cancelled_is_told_of_or_ends_the_run() -> None:
    async def awaits() -> None:
        task = asyncio.ensure_future(asyncio.sleep(30))
        task.cancel("no longer wanted")
        await task

    said = f"{call('awaits')}{call('weather', city='Rome')}"
    async with fake_model(said, "Sorry.", said) as model:
        request = ASK.with_tools([awaits, weather])
        await model.send_chat_with_tools(request)
        told, other = answers_of(model.requests[1])
        assert told[1].startswith("Error: CancelledError")
        assert other == ("weather", "1 times 20 degrees in Rome")
        with pytest.raises(ToolError, match="awaits raised CancelledError") as caught:
            await model.send_chat_with_tools(request, on_error="raise")
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)


class Reading(pydantic.BaseModel):
    at: datetime.date
    unit: Unit


@pytest.mark.anyio
async def test_results_are_written_as_arguments_are() -> None:
    day = datetime.date(2026, 1, 2)
    results: list[object] = [
        Unit.CELSIUS,
        [datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC), day, datetime.time(3, 4)],
        {"readings": [Reading(at=day, unit=Unit.CELSIUS)]},
        frozenset({"one"}),
        Span(1, 2),
    ]

    async def result(number: int) -> object:
        await anyio.lowlevel.checkpoint()
        return results[number]

    async with fake_model("".join(call("result", number=number) for number in range(len(results))), "Done.") as model:
        await model.send_chat_with_tools(ASK.with_tools([result]))
        assert [json.loads(text) for _, text in answers_of(model.requests[1])] == [
            Unit.CELSIUS.value,
            ["2026-01-02T03:04:00+00:00", "2026-01-02", "03:04:00"],
            {"readings": [{"at": "2026-01-02", "unit": Unit.CELSIUS.value}]},
            ["one"],
            {"first": 1, "last": 2},
        ]


class Sensor:
    def __str__(self) -> str:
        return "sensor 7"


class Measured(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    sensor: Sensor
    reading: Reading


@dataclass
class Page:
    number: int

    def model_dump(self) -> str:
        return "of its own"


@pytest.mark.anyio
async def test_results_that_pydantic_cannot_write_are_written_field_by_field() -> None:
    reading = Reading(at=datetime.date(2026, 1, 2), unit=Unit.CELSIUS)
    results: list[object] = [Measured(sensor=Sensor(), reading=reading), Page(3)]

    def result(number: int) -> object:
        return results[number]

    async with fake_model("".join(call("result", number=number) for number in range(len(results))), "Done.") as model:
        await model.send_chat_with_tools(ASK.with_tools([result]), on_error="raise")
        assert [json.loads(text) for _, text in answers_of(model.requests[1])] == [
            {"sensor": "sensor 7", "reading": {"at": "2026-01-02", "unit": Unit.CELSIUS.value}},
            {"number": 3},
        ]


@pytest.mark.anyio
async def test_names_that_are_no_unicode_go_to_the_model() -> None:
    """As os.listdir has them, and as errors of the system quote them."""

    def names() -> list[str]:
        return ["a.txt", "b\udcff.txt"]

    def first() -> str:
        return "b\udcff.txt"

    def read() -> str:
        raise FileNotFoundError("no file b\udcff.txt")

    async with fake_model(f"{call('names')}{call('first')}{call('read')}", "There are two.") as model:
        run = await model.send_chat_with_tools(ASK.with_tools([names, first, read]))
        assert run.response.choices[0].message.content == "There are two."
        assert answers_of(model.requests[1]) == [
            ("names", '["a.txt", "b\\udcff.txt"]'),
            ("first", "b\\udcff.txt"),
            ("read", "Error: FileNotFoundError: no file b\\udcff.txt"),
        ]


@pytest.mark.anyio
async def test_a_tool_that_hangs_is_told_of_or_ends_the_run() -> None:
    ends = threading.Event()

    def hangs() -> str:
        ends.wait(30)
        return "late"

    async def waits() -> None:
        await anyio.sleep_forever()

    said = call("hangs") + call("waits")
    try:
        async with fake_model(said, "Sorry.", said) as model:
            request = ASK.with_tools([hangs, waits])
            await model.send_chat_with_tools(request, tool_timeout=0.05)
            told = "Error: TimeoutError: it did not return within 0.05 seconds"
            assert answers_of(model.requests[1]) == [("hangs", told), ("waits", told)]
            with pytest.raises(ToolError, match="raised TimeoutError") as caught:
                await model.send_chat_with_tools(request, on_error="raise", tool_timeout=0.05)
            assert isinstance(caught.value.__cause__, TimeoutError)
            for wrong in (0, -1, float("inf"), True, "5"):
                with pytest.raises(InvalidRequestError, match="tool_timeout"):
                    await model.send_chat_with_tools(request, tool_timeout=wrong)  # type: ignore[arg-type]  # refused
        async with fake_model(said, "Sorry.") as model:
            chat = Conversation(model, tools=[hangs, waits], tool_timeout=0.05)
            await chat.send("Hi!")
            assert answers_of(model.requests[1]) == [("hangs", told), ("waits", told)]
    finally:
        ends.set()


@pytest.mark.anyio
async def test_arguments_that_do_not_fit_are_told() -> None:
    wrong: tuple[dict[str, Any], ...] = ({"city": 5}, {}, {"city": "x", "country": "y"}, {"city": "x", "days": "3"})
    said = "".join(call("weather", **arguments) for arguments in wrong)
    async with fake_model(said, "Sorry.") as model:
        await model.send_chat_with_tools(ASK.with_tools([weather]))
        told = [text.removeprefix("Error: ValueError: ") for _, text in answers_of(model.requests[1])]
        assert told == [
            "city = 5 is not a string",
            "missing a required argument: 'city'",
            "got an unexpected keyword argument 'country'",
            "days = '3' is not an integer",
        ]


@pytest.mark.anyio
async def test_a_model_that_goes_on_calling_meets_the_bound() -> None:
    async with fake_model(call("weather", city="x")) as model:
        with pytest.raises(ToolRoundsError, match="after 3 rounds") as caught:
            await model.send_chat_with_tools(ASK.with_tools([weather]), max_rounds=3)
        assert caught.value.max_rounds == 3
        assert len(caught.value.responses) == len(model.requests) == 4
        assert caught.value.partial_response == caught.value.responses[-1]


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["required", "weather"])
async def test_a_required_call_is_one_of_the_first_answer(choice: str) -> None:
    async with fake_model(call("weather", city="Paris"), "It is warm.") as model:
        run = await model.send_chat_with_tools(ASK.with_tools([weather], choice))
        assert run.response.choices[0].message.content == "It is warm."
        assert [request.options.tool_choice for request in model.requests] == [choice, "auto"]


@pytest.mark.anyio
async def test_cancelling_ends_a_run_within_a_tool() -> None:
    begun = anyio.Event()
    ended = []

    async def wait() -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("tool")

    async with fake_model(call("wait")) as model, anyio.create_task_group() as tasks:

        async def run() -> None:
            await model.send_chat_with_tools(ASK.with_tools([wait]))

        tasks.start_soon(run)
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert ended == ["tool"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("request_", "options", "field"),
    [
        (ASK.with_tools([Tool(name="f")]), {}, "tools"),
        (ASK.with_tools([weather]).with_sampling(SamplingParams(n_choices=2)), {}, "n_choices"),
        (ASK.with_tools([weather]), {"max_rounds": 0}, "max_rounds"),
        (ASK.with_tools([weather]), {"max_rounds": True}, "max_rounds"),
        (ASK.with_tools([weather]), {"on_error": "ignore"}, "on_error"),
    ],
)
async def test_what_cannot_be_run_is_refused_before_anything_is_sent(
    request_: RequestBuilder, options: dict[str, Any], field: str
) -> None:
    async with fake_model("x") as model:
        with pytest.raises(InvalidRequestError) as caught:
            await model.send_chat_with_tools(request_, **options)
        assert caught.value.field == field
        assert not model.requests


@pytest.mark.anyio
async def test_a_conversation_keeps_the_turns_of_tools() -> None:
    async with fake_model(call("weather", city="x"), "Warm.", "Bye.") as model:
        chat = Conversation(model, system="Be brief.", tools=[weather])
        assert (await chat.send("How warm is it?")).choices[0].message.content == "Warm."
        assert [message.role.value for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
        await chat.send("Thanks.")
        assert model.requests[2].messages == chat.messages[:-1]
        with pytest.raises(InvalidRequestError, match="cannot be streamed"):
            chat.stream("And now?")


def leave() -> str:
    """End the program."""
    sys.exit(3)


async def leave_soon() -> str:
    """End the program."""
    await anyio.lowlevel.checkpoint()
    sys.exit(3)


@pytest.mark.parametrize("tool", [leave, leave_soon])
def test_a_tool_that_ends_the_program_does(tool: Any) -> None:
    with BlockingModel(fake_model(call(tool.__name__), "Still here.")) as model:
        with pytest.raises(SystemExit) as ended:
            model.send_chat_with_tools(ASK.with_tools([tool]))
        assert ended.value.code == 3
        assert model.send_chat_request(ASK).choices[0].message.content == "Still here."


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_tool_that_ends_the_program_does_in_an_event_loop_of_its_own(backend: str) -> None:
    async def main() -> None:
        async with fake_model(f"{call('leave')}{call('cities')}") as model:
            await model.send_chat_with_tools(ASK.with_tools([leave, cities]))

    with pytest.raises(SystemExit) as ended:
        anyio.run(main, backend=backend)
    assert ended.value.code == 3


def ask_in_vain() -> str:
    """Ask the user, who presses Ctrl-C, as what reads a terminal key by key raises it in any thread."""
    raise KeyboardInterrupt


def test_a_tool_that_reads_ctrl_c_ends_the_call_alone() -> None:
    with BlockingModel(fake_model(call("ask_in_vain"), "Still here.")) as model:
        with pytest.raises(KeyboardInterrupt):
            model.send_chat_with_tools(ASK.with_tools([ask_in_vain]))
        assert model.send_chat_request(ASK).choices[0].message.content == "Still here."


async def look_up() -> str:
    """Wait for something that was given up."""
    task = asyncio.ensure_future(anyio.sleep(60))
    task.cancel()
    await task
    return "never"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_tool_that_waits_for_what_was_cancelled_has_failed() -> None:
    async with fake_model(call("look_up") + call("cities"), "Warm.") as model:
        run = await model.send_chat_with_tools(ASK.with_tools([look_up, cities]))
        assert [message.content for message in run.messages[1:3]] == ["Error: CancelledError: ", '["Łódź", "Paris"]']
        with pytest.raises(ToolError, match="look_up raised CancelledError") as caught:
            async with fake_model(call("look_up")) as other:
                await other.send_chat_with_tools(ASK.with_tools([look_up]), on_error="raise")
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)


def test_synchronous_code_runs_tools_too() -> None:
    with BlockingModel(fake_model(call("weather", city="x") + call("cities"), "Warm.")) as model:
        run = model.send_chat_with_tools(ASK.with_tools([weather, cities]))
        assert run.response.choices[0].message.content == "Warm."
        assert [message.content for message in run.messages[1:3]] == ["1 times 20 degrees in x", '["Łódź", "Paris"]']


@pytest.mark.parametrize("through_another", [False, True])
def test_a_tool_may_close_the_model_that_has_called_it(through_another: bool) -> None:
    others = set(threading.enumerate())
    model = BlockingModel(fake_model(call("end"), "Never."))
    (thread,) = (each for each in threading.enumerate() if each not in others and "portal" in each.name)
    other = BlockingModel(fake_model(call("close"), "Closed."))

    def close() -> str:
        """Close the first model."""
        model.close()
        with pytest.raises(ModelClosedError):
            model.check()
        return "closed"

    def end() -> str:
        """Close the model, or have another model do so."""
        if not through_another:
            return close()
        return other.send_chat_with_tools(ASK.with_tools([close])).response.choices[0].message.content or ""

    with other, pytest.raises(ModelClosedError):
        model.send_chat_with_tools(ASK.with_tools([end]), on_error="raise")
    thread.join(60)
    assert not thread.is_alive()


@attrs.frozen
class Rule:
    span: Span
    unit: Unit = Unit.KELVIN


def typed(
    place: Place | None = None,
    rule: Annotated[Rule | None, "what to look at"] = None,
    unit: Unit = Unit.CELSIUS,
    kind: Literal["a", 1] = 1,
    size: float | int = 0,
    points: tuple[float, str] = (0, ""),
    many: tuple[int, ...] = (),
    table: dict[str, list[Span]] | None = None,
    anything: Any = None,
) -> None:
    pass


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"place": {"city": "x"}}, {"city": "x"}),
        ({"place": None}, None),
        ({"rule": {"span": {"first": 1}, "unit": "celsius"}}, Rule(Span(1), Unit.CELSIUS)),
        ({"unit": "kelvin"}, Unit.KELVIN),
        ({"kind": 1}, 1),
        ({"size": 3}, 3),
        ({"size": 3.5}, 3.5),
        ({"points": [1, "x"]}, (1.0, "x")),
        ({"many": [1, 2.0]}, (1, 2)),
        ({"table": {"a": [{"first": 1, "last": 2}]}}, {"a": [Span(1, 2)]}),
        ({"anything": {"a": [1]}}, {"a": [1]}),
    ],
)
def test_arguments_are_of_the_types_that_annotations_say(given: dict[str, Any], expected: Any) -> None:
    ((name, value),) = bind_arguments(typed, given).items()
    assert name in given
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"place": {}}, "place.city is missing"),
        ({"place": {"city": "x", "street": "y"}}, "has no street"),
        ({"rule": {"span": {}}}, "rule.span: missing a required argument: 'first'"),
        ({"rule": {"span": 5}}, "rule.span = 5 is not an object"),
        ({"unit": "Kelvin"}, "unit = 'Kelvin' is not one of 'celsius', 'kelvin'"),
        ({"kind": True}, "kind = True is not one of 'a', 1"),
        ({"size": True}, "size = True is not"),
        ({"points": [1]}, "points = [1] is not a list of 2"),
        ({"many": "12"}, "many = '12' is not a list"),
        ({"many": [1.5]}, "many[0] = 1.5 is not an integer"),
        ({"table": {"a": [{"last": 2}]}}, "missing a required argument: 'first'"),
    ],
)
def test_arguments_of_other_types_are_said(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        bind_arguments(typed, given)
    assert told in str(caught.value)
