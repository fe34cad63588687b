"""Replicas in processes of their own: how they start, what becomes of requests when one dies, and that none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import pytest
from replica_builders import Dying, Endless, Fakes, Refusing

from adapter_files import write_adapter
from paged_sdk import (
    ConfigError,
    Constraint,
    EngineDeadError,
    HangLimits,
    InvalidRequestError,
    IsqType,
    Model,
    ModelClosedError,
    ModelLoadError,
    ReplicaSet,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.remote.channel import Channel
from paged_sdk.remote.process import EngineProcess
from paged_sdk.routing.in_processes import ProcessorShare, processor_shares
from paged_sdk.routing.replica_set import ReplicatedModel
from paged_sdk.server import create_app
from paged_sdk.testing import fake_model
from slow_fakes import SLOW_TEXT, let_end, slow_fake
from talk import LONG, hello, said, until
from tiny import build_model, make_checkpoint
from tiny_vision import make_vision_checkpoint, picture

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="processes and what is left of them are looked up in /proc"),
]

SLOW = Fakes(LONG * 20, delay=0.02)
"""Is still at it when all have begun, whatever else the machine does."""


def pids(model: ReplicatedModel) -> list[int]:
    return [each.pid for each in model.replicas]  # type: ignore[attr-defined]


def num_of_first(model: ReplicatedModel) -> int:
    """Return how many requests the first replica has, which depends on when each was ready to be sent to one."""
    number = sum(each.route is not None and each.route.replica == 0 for each in model._routed._live.values())
    assert number
    return number


def children() -> set[int]:
    """Return the processes that this one has started and that are still there, as zombies or not."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.005)


def is_ours(thread: threading.Thread) -> bool:
    """Tell whether a thread belongs to a replica. Those that make tokens are the event loop's."""
    return thread.name.startswith("paged-sdk") and thread.name != "paged-sdk helper"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Compare what there is of files, threads and processes before a test and after it."""
    files, threads, before = os.listdir("/proc/self/fd"), set(threading.enumerate()), children()
    yield
    wait_for(lambda: not {each for each in threading.enumerate() if is_ours(each)} - threads)
    assert len(os.listdir("/proc/self/fd")) <= len(files)
    assert children() <= before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_they_begin_and_end_where_all_threads_of_the_application_are_busy() -> None:
    done = threading.Event()
    limiter = anyio.to_thread.current_default_thread_limiter()
    usual, limiter.total_tokens = limiter.total_tokens, 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, done.wait, 60)
        await until(lambda: limiter.available_tokens == 0)
        try:
            with anyio.fail_after(30):
                async with ReplicaSet([Fakes()], in_processes=True) as model:
                    running = pids(model)
                with pytest.raises(ConfigError, match="none at all"):
                    await ReplicaSet([Refusing()], in_processes=True)
        finally:
            done.set()
            limiter.total_tokens = usual
    assert not any(map(is_running, running))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_it_answers_as_any_model() -> None:
    async with ReplicaSet([Fakes()] * 2, in_processes=True) as model:
        assert len({os.getpid(), *pids(model)}) == 3
        assert [await said(model, hello(f"{n}")) for n in range(4)] == ["Hello!"] * 4
        response = await model.send_completion_request(["a", "b"], SamplingParams(n_choices=2))
        assert [choice.text for choice in response.choices] == ["Hello!"] * 4
        async with model.stream_chat_request(hello()) as stream:
            assert "".join([chunk.choices[0].delta.content async for chunk in stream if chunk.choices]) == "Hello!"
        assert [len(each) for each in (await model.embed(["aab", "b"])).embeddings] == [258, 258]
        assert all(each.completion_tokens for each in model.replica_stats())
        assert model.stats().blocks_total == 2 * 4096
        await model.reset_prefix_cache()
        assert model.stats().blocks_cached == 0
        with pytest.raises(InvalidRequestError, match="another process"):
            await model.send_completion_request("a", logits_processors=[lambda token_ids, logits: None])
        assert said_by_a_forked_child(model) == 0
        running, text = pids(model), list[str]()

        async def send() -> None:
            text.append(await said(model, hello()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            while not model.stats().running and not text:
                await anyio.lowlevel.checkpoint()
            await model.aclose(drain=True)
        assert text == ["Hello!"]
    assert not any(map(is_running, running))
    with pytest.raises(ModelClosedError):
        await said(model, hello())


def said_by_a_forked_child(model: Model) -> int:
    """Return 0 if a forked child that uses its parent's model gets the error for that."""
    child = os.fork()
    if child == 0:
        try:
            model.check()
        except ModelClosedError:
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_killed_replica_takes_only_what_it_has_said_something_of() -> None:
    async with ReplicaSet([SLOW, Fakes(LONG, delay=0.005)], in_processes=True) as model:
        outcomes: list[str] = []
        errors: list[EngineDeadError] = []
        begun = 0

        async def send(number: int) -> None:
            nonlocal begun
            try:
                async with model.stream_chat_request(hello(f"{number}")) as stream:
                    text = (await anext(stream)).choices[0].delta.content
                    begun += 1
                    async for chunk in stream:
                        text += "".join(choice.delta.content for choice in chunk.choices)
                outcomes.append(text)
            except EngineDeadError as error:
                errors.append(error)

        killed = pids(model)[0]
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(send, number)
            await until(lambda: begun == 8)
            cut_off = num_of_first(model)
            os.kill(killed, signal.SIGSTOP)  # what comes now is not heard of there
            for number in range(8, 12):
                tasks.start_soon(send, number)
            await until(lambda: len(model._routed._live) == 12 or begun > 8)
            start = time.monotonic()
            os.kill(killed, signal.SIGKILL)
            await until(lambda: len(errors) == cut_off)
            assert time.monotonic() - start < 5
            with pytest.raises(EngineDeadError, match="signal 9"):
                model.replicas[0].check()
            model.check()
        assert (len(outcomes), len(errors)) == (12 - cut_off, cut_off)
        assert set(outcomes) == {LONG}
        for error in errors:
            assert f"replica 0 (process {killed}): it has ended with signal 9" in str(error)
            assert error.partial_response is not None
            assert SLOW.text.startswith(error.partial_response.choices[0].message.content)  # type: ignore[union-attr]
        assert await said(model, hello(sampling=SamplingParams(max_len=5))) == LONG[:5]
        transport = httpx2.ASGITransport(app=create_app({"m": model}))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            assert (await client.get("/health")).status_code == 200
            figures = (await client.get("/metrics")).text
            assert 'paged_sdk_replica_up{model="m",replica="0"} 0.0' in figures
            assert 'paged_sdk_replica_up{model="m",replica="1"} 1.0' in figures
            assert 'paged_sdk_replica_completion_tokens_total{model="m",replica="1"}' in figures
            os.kill(pids(model)[1], signal.SIGKILL)
            with anyio.fail_after(20):
                while (await client.get("/health")).status_code == 200:
                    await anyio.sleep(0.005)
        with pytest.raises(EngineDeadError):
            await said(model, hello())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_frozen_replica_is_killed_and_its_requests_fare_as_those_of_a_dead_one() -> None:
    async with ReplicaSet([SLOW, Fakes(LONG, delay=0.005)], in_processes=True) as model:
        outcomes: list[str] = []
        errors: list[EngineDeadError] = []
        begun = 0

        async def send(number: int) -> None:
            nonlocal begun
            try:
                async with model.stream_chat_request(hello(f"{number}")) as stream:
                    text = (await anext(stream)).choices[0].delta.content
                    begun += 1
                    async for chunk in stream:
                        text += "".join(choice.delta.content for choice in chunk.choices)
                outcomes.append(text)
            except EngineDeadError as error:
                errors.append(error)

        frozen, pid = model.replicas[0], pids(model)[0]
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(send, number)
            await until(lambda: begun == 8)
            cut_off = num_of_first(model)
            os.kill(pid, signal.SIGSTOP)
            for number in range(8, 12):
                tasks.start_soon(send, number)
            await until(lambda: len(model._routed._live) == 12 or begun > 8)

            def look() -> bool:  # what was on its way when it was stopped may still come
                frozen._process._look()  # type: ignore[attr-defined]
                return len(errors) == cut_off

            await until(look)
        await until(lambda: not is_running(pid))
        assert (len(outcomes), set(outcomes)) == (12 - cut_off, {LONG})
        for error in errors:
            assert f"replica 0 (process {pid}): it has hung: nothing was heard of it for 60 s" in str(error)
            assert error.partial_response is not None
            assert SLOW.text.startswith(error.partial_response.choices[0].message.content)  # type: ignore[union-attr]
        assert await said(model) == LONG


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_hung_replica_is_noticed_after_its_limit() -> None:
    limits = HangLimits(silent_seconds=0.3, step_seconds=None)
    async with ReplicaSet([fake_model("Here."), Fakes()], in_processes=True, hang_limits=limits) as model:
        pid = model.replicas[1].pid  # type: ignore[attr-defined]
        with suppress(ProcessLookupError):  # this machine is so slow that it is noticed already
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: has_hung(model.replicas[1]))
        assert await said(model) == "Here."
        await until(lambda: not is_running(pid))
    limits = HangLimits(silent_seconds=None, step_seconds=0.3)
    first, texts = slow_fake(), list[str]()

    async def send(number: int) -> None:
        texts.append(await said(model, hello(f"{number}")))

    async with ReplicaSet([first, Fakes(delay=3600)], in_processes=True, hang_limits=limits) as model:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(send, number)
            await until(lambda: len(model._routed._live) == 4)  # while the first is busy, the other gets some
            let_end(first)
        assert texts == [SLOW_TEXT] * 4
        with pytest.raises(EngineDeadError, match=r"replica 1 .*: a step of its engine has taken 0.3 s"):
            model.replicas[1].check()


def has_hung(model: Model) -> bool:
    try:
        model.check()
    except EngineDeadError as error:
        assert "nothing was heard of it for 0.3 s" in str(error)
        return True
    return False


def test_to_load_for_long_is_not_to_hang() -> None:
    process = EngineProcess(Endless(), name="replica 0", wants_preparer=False, hang_limits=HangLimits())
    for _ in range(100):
        process._look()
    assert is_running(process.pid)
    process.end()
    assert not is_running(process.pid)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_cannot_be_built_is_a_typed_error() -> None:
    def local() -> None:
        raise AssertionError("it cannot be sent")

    class Local:
        build = staticmethod(local)

    with pytest.raises(ConfigError, match="none at all") as refused:
        await ReplicaSet([Refusing()], in_processes=True)
    assert (refused.value.setting, refused.value.value) == ("threads", 3)
    with pytest.raises(ModelLoadError, match=r"replica 0 \(process \d+\) could not build its model: .*status 7"):
        await ReplicaSet([Dying()], in_processes=True)
    with pytest.raises(ConfigError, match="can be sent"):
        await ReplicaSet([Local()], in_processes=True)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="max_model_len differs"):
        await ReplicaSet([Fakes(), fake_of_other_length()], in_processes=True)
    with pytest.raises(ConfigError, match="in_processes"):
        ReplicaSet([Fakes()], in_processes=2)  # type: ignore[arg-type]
    for limits, allowed in ((60, "HangLimits or None"), (HangLimits(), "without in_processes")):
        with pytest.raises(ConfigError, match=f"hang_limits.*{allowed}"):
            ReplicaSet([Fakes()], hang_limits=limits)  # type: ignore[arg-type]
    with anyio.move_on_after(0.3) as scope:
        await ReplicaSet([Endless()], in_processes=True)
    assert scope.cancelled_caught


def fake_of_other_length() -> Model:
    return fake_model("Hello!", max_model_len=8192)


def test_replicas_share_the_processors() -> None:
    one, two = {0: frozenset(range(8))}, {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert processor_shares(3, one, 8) == [ProcessorShare(2)] * 3
    assert processor_shares(16, one, 8) == [ProcessorShare(1)] * 16
    assert processor_shares(2, two, 8) == [ProcessorShare(4, two[0]), ProcessorShare(4, two[1])]
    assert processor_shares(4, two, 6) == [ProcessorShare(1, two[0])] * 2 + [ProcessorShare(1, two[1])] * 2
    assert processor_shares(3, two, 8) == [ProcessorShare(2)] * 3


@pytest.mark.parametrize("sizes", [[3], [0, 5, 0], [1 << 22, 7], [2] * 1500])
def test_parcels_of_any_size_go_through_a_channel(sizes: list[int]) -> None:
    out, into = map(Channel, socket.socketpair())
    parcel = [os.urandom(size) for size in sizes]

    def write() -> None:
        out.write(parcel)
        out.write([b"last"])
        out.close()

    thread = threading.Thread(target=write)
    thread.start()
    assert into.read() == parcel
    assert into.read() == [b"last"]
    assert into.read() is None
    thread.join()
    with pytest.raises(BrokenPipeError):
        out.write([b"later"])
    for channel in (out, into):
        channel.release()


KILLED = """
import anyio, os, sys, time
from paged_sdk import ReplicaSet
from replica_builders import Fakes

async def main():
    model = await ReplicaSet([Fakes("word " * 2000, delay=0.01)], in_processes=True)
    stream = model.stream_chat_request([{"role": "user", "content": "Hi!"}])
    await anext(stream)
    if os.fork() == 0:  # it holds the connections open
        time.sleep(3600)
        os._exit(0)
    print(*[each.pid for each in model.replicas], flush=True)
    await anyio.sleep(60)

anyio.run(main)
"""


def test_replicas_end_with_the_process_that_has_started_them(tmp_path: Path) -> None:
    paths = os.pathsep.join(sys.path)
    script = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}, process_group=0
    )
    try:
        assert script.stdout is not None
        running = list(map(int, script.stdout.readline().split()))
        assert len(running) == 1
        assert all(map(is_running, running))
        script.kill()
        script.wait()
        wait_for(lambda: not any(map(is_running, running)))
    finally:
        os.killpg(script.pid, signal.SIGKILL)
        script.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_adapter_is_found_from_where_the_program_is_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = TextModelBuilder(make_checkpoint("llama", tmp_path / "text")).with_force_cpu().with_num_threads(1)
    write_adapter(tmp_path / "here", build_model("llama"))
    async with ReplicaSet([builder], in_processes=True) as model:
        monkeypatch.chdir(tmp_path)
        await model.load_adapter("here")
        assert model.adapters == ("here",)


WITHOUT_STREAMS = """
import anyio, os, sys
from paged_sdk import ReplicaSet
from replica_builders import Fakes

async def main():
    if sys.argv[1] == "after":
        os.closerange(0, 3)
    async with ReplicaSet([Fakes()], in_processes=True) as model:
        answer = await model.send_chat_request([{"role": "user", "content": "Hi!"}])
    os.write(said, answer.choices[0].message.content.encode())

said = os.dup(1)
if sys.argv[1] == "before":  # so that the event loop has their numbers
    os.closerange(0, 3)
anyio.run(main)
"""


@pytest.mark.parametrize("closed", ["before", "after"])
def test_an_application_without_standard_streams_has_replicas_too(closed: str) -> None:
    script = subprocess.run(
        [sys.executable, "-c", WITHOUT_STREAMS, closed],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )
    assert script.stdout == b"Hello!"


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_models_with_weights_answer_as_in_this_process(tmp_path: Path) -> None:
    checkpoint = tmp_path / "seeing"
    make_vision_checkpoint("qwen2_vl", checkpoint)
    adapter = write_adapter(tmp_path / "adapter", build_model("llama"))
    text_checkpoint = make_checkpoint("llama", tmp_path / "text")
    greedy = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True, top_n_logprobs=2)
    pictured = VisionMessages().add_image_message(TextMessageRole.USER, "What is it?", [picture(40, 60)])
    seeing = VisionModelBuilder(checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = TextModelBuilder(text_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)

    async def texts(model: Model) -> list[str]:
        await model.load_adapter(adapter, name="a")
        parts = [
            await model.send_completion_request([5, 6, 7, place], greedy, adapter=name)
            for place in range(4)
            for name in (None, "a")
        ]
        parts.append(await model.send_completion_request([5], greedy, constraint=Constraint.regex("[ab]{4,9}")))
        await model.unload_adapter("a")
        await model.re_isq_model(IsqType.Q8_0)
        parts.append(await model.send_completion_request([5], greedy))
        return [repr((each.choices[0].text, each.choices[0].logprobs)) for each in parts]

    async with builder.build() as own, ReplicaSet([builder] * 2, in_processes=True) as model:
        assert await texts(model) == await texts(own)
    request = RequestBuilder.from_messages(pictured).with_sampling(greedy)
    async with seeing.build() as own, ReplicaSet([seeing] * 2, in_processes=True) as model:
        assert model.takes_images
        expected = await own.send_chat_request(request)
        for _ in range(2):
            response = await model.send_chat_request(request)
            assert response.choices == expected.choices


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replicas_are_killed_under_two_hundred_streams() -> None:
    async with ReplicaSet([Fakes(LONG, delay=0.002)] * 4, in_processes=True) as model:
        outcomes: Counter[str] = Counter()

        async def send(number: int) -> None:
            heard = ""
            try:
                async with model.stream_chat_request(hello(f"{number}")) as stream:
                    async for chunk in stream:
                        heard += "".join(choice.delta.content for choice in chunk.choices)
                assert heard == LONG
                outcomes["whole"] += 1
            except EngineDeadError as error:
                assert heard, "what has not begun goes elsewhere"
                assert error.partial_response is not None
                outcomes["cut off"] += 1

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(send, number)
                for place in range(3):
                    while model.replica_stats()[place].completion_tokens < 500 * (place + 1):
                        await anyio.sleep(0.001)
                    os.kill(pids(model)[place], signal.SIGKILL)
        assert outcomes.total() == 200
        assert outcomes["cut off"] <= 3 * 32
        assert await said(model, hello()) == LONG
