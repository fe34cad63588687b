"""Replicas under Ray Serve, with a stand-in for it: a model follows them as they come, go and die."""

from __future__ import annotations

import gc
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx2
import pytest
from stand_in import StandIn, connected, opened

from adapter_files import write_adapter
from caught_errors import KnownError, goes_when_caught
from paged_sdk import (
    CheckpointError,
    ConfigError,
    Constraint,
    EngineDeadError,
    HangLimits,
    InvalidRequestError,
    IsqType,
    Model,
    ModelClosedError,
    PagedError,
    QueueFullError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.ray import RayReplicas, fleet, serve_app
from paged_sdk.ray.hung_engine import until_hung
from paged_sdk.ray.options import resources_of, with_health_checks, with_resources
from paged_sdk.ray.ray_loop import RayLoop
from paged_sdk.ray.replicas import in_loop
from paged_sdk.ray.sessions import Sessions
from paged_sdk.server import create_app
from paged_sdk.testing import fake_model
from paged_sdk.worker.worker import Worker
from slow_fakes import SLOW_TEXT, let_end, slow_fake
from talk import hello, said, until
from tiny import build_model, make_checkpoint

pytestmark = pytest.mark.anyio


async def test_it_answers_as_any_model() -> None:
    async with fake_model("Hello!") as first, fake_model("Hello!") as second:
        serve = StandIn({"a": first, "b": second})
        async with opened(serve) as model:
            assert [await said(model) for _ in range(3)] == ["Hello!"] * 3
            assert len(model.replicas) == 2
            responses = await model.send_chat_requests([hello(f"{n}") for n in range(20)])
            assert {each.choices[0].message.content for each in responses} == {"Hello!"}
            assert len((await model.embed(["aab", "b"])).embeddings) == 2
            await model.reset_prefix_cache()
            with pytest.raises(ConfigError, match="keep the weights"):
                await model.re_isq_model(IsqType.Q8_0)
            assert model.stats().completion_tokens == sum(each.stats().completion_tokens for each in (first, second))
        with pytest.raises(ModelClosedError):
            await said(model)
        await model.aclose()
        first.check()  # only this process's model is closed


async def test_replicas_come_and_go() -> None:
    async with slow_fake() as first, fake_model("Two.") as second:
        serve = StandIn({"a": first})
        async with opened(serve) as model, anyio.create_task_group() as tasks:
            tasks.start_soon(said, model)
            await until(lambda: first.stats().running == 1)
            serve.start("b", second)
            await until(lambda: len(model.replicas) == 2)
            assert await said(model, hello("Another?")) == "Two."
            serve.retire("a")
            await until(lambda: len(model.replicas) == 1)
            assert [await said(model) for _ in range(2)] == ["Two."] * 2
            assert first.stats().running == 1  # what it had goes on
            let_end(first)
            await until(lambda: first.stats().running == 0)
            assert first.stats().completion_tokens == len(SLOW_TEXT) + 1
        assert serve.links == {"a": 1, "b": 1}


async def test_the_figures_of_a_replica_stay_its_own_whichever_go() -> None:
    async with fake_model("One.") as first, fake_model("Two.") as second, fake_model("Three.") as third:
        serve = StandIn({"a": first})

        async with opened(serve) as model:
            transport = httpx2.ASGITransport(app=create_app({"m": model}))

            async def figures() -> dict[str, float]:
                async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
                    lines = (await client.get("/metrics")).text.splitlines()
                started = 'paged_sdk_replica_steps_total{model="m",replica="'
                return {line[len(started) :][0]: float(line.split()[1]) for line in lines if line.startswith(started)}

            assert await figures() == {}  # of one alone there are none beside the model's own
            serve.start("b", second)
            await until(lambda: len(model.replicas) == 2)
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(said, model, hello(f"{number}"))
            before = await figures()
            assert before.keys() == {"0", "1"}
            serve.retire("a")
            await until(lambda: len(model.replicas) == 1)
            assert await figures() == {"1": before["1"]}
            serve.start("c", third)
            await until(lambda: len(model.replicas) == 2)
            assert (await figures()).keys() == {"1", "2"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_death_is_noticed_and_what_was_not_heard_of_goes_elsewhere() -> None:
    fakes = {name: slow_fake(max_num_seqs=4) for name in "ab"}
    serve = StandIn(fakes)
    texts: list[str] = []
    errors: list[EngineDeadError] = []

    async def ask(model: Model, number: int) -> None:
        try:
            texts.append(await said(model, hello(f"{number}")))
        except EngineDeadError as error:
            errors.append(error)

    async with fakes["a"], fakes["b"], opened(serve) as model:
        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(ask, model, number)
            await until(lambda: model.stats().running == 8 and model.stats().completion_tokens > 50)
            serve.kill("a")
            let_end(fakes["b"])
        assert len(texts) == 12
        assert set(texts) == {SLOW_TEXT}
        assert len(errors) == 4
        assert str(errors[0]) == "replica a: The actor died."
        partial = errors[0].partial_response
        assert partial is not None
        assert SLOW_TEXT.startswith(partial.choices[0].message.content)  # type: ignore[union-attr]
        serve.kill("b")
        await until(lambda: not model.replicas)
        with pytest.raises(EngineDeadError, match="no replica is running"):
            await said(model)
        async with fake_model("Again.") as third:
            serve.start("c", third)
            await until(lambda: len(model.replicas) == 1)
            assert await said(model) == "Again."


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_step_that_does_not_end_is_noticed_and_what_was_not_heard_of_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "PAUSE_SECONDS", 0.001)
    async with fake_model("One.", delay=3600) as hanging, fake_model("Two.") as other:
        worker = hanging._insides.worker
        assert isinstance(worker, Worker)
        serve = StandIn({"a": hanging, "b": other})
        async with opened(serve) as model, anyio.create_task_group() as tasks:
            texts: list[str] = []

            async def ask(number: int) -> None:
                texts.append(await said(model, hello(f"{number}")))

            for number in range(4):
                tasks.start_soon(ask, number)
            with anyio.fail_after(20):
                reason = await until_hung(worker, 0.2)
            assert reason == "it has hung: a step of its engine has taken 0.2 s"
            sessions = serve.sessions("a")
            assert isinstance(sessions, Sessions)
            serve.loop.call_soon(partial(sessions.fail, EngineDeadError(reason)))
            await until(lambda: texts == ["Two."] * 4)
            await until(lambda: serve.links["a"] > 2)  # until Ray Serve asks for its health it is tried again, in vain
            assert len(model.replicas) == 1
            assert await said(model) == "Two."
            serve.retire("a")
        with anyio.move_on_after(0.01) as scope:
            await until_hung(worker, None)
        assert scope.cancelled_caught


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_requests_wait_for_a_replacement() -> None:
    async with fake_model("One.", delay=3600) as first, fake_model("Two.") as second:
        serve = StandIn({"a": first})
        async with opened(serve, replacement_seconds=3600) as model:
            texts: list[str] = []

            async def ask(text: str) -> None:
                texts.append(await said(model, hello(text)))

            async with anyio.create_task_group() as tasks:
                for number in range(3):  # nothing is heard of them before the only replica dies
                    tasks.start_soon(ask, f"{number}")
                await until(lambda: len(model._routed._live) == 3)
                serve.kill("a")
                await until(lambda: not model.replicas and model.stats().waiting == 3)
                model.check()  # what comes now is not refused
                tasks.start_soon(ask, "Later?")
                with anyio.move_on_after(0.01) as scope:
                    await said(model, hello("Too late."))
                assert scope.cancelled_caught
                with pytest.raises(RequestTimeoutError):
                    await said(model, hello("Too late.", timeout=0.01))
                await until(lambda: model.stats().waiting == 4)
                serve.start("b", second)
            assert texts == ["Two."] * 4
            assert model.stats().waiting == 0
            assert len(second.requests) == 4


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_absence_has_its_limit() -> None:
    async with fake_model("One.") as first, fake_model("Two.") as second:
        serve = StandIn({"a": first})
        async with opened(serve, replacement_seconds=0.05) as model:
            serve.kill("a")
            await until(lambda: not model.replicas)
            for _ in range(2):  # the first may wait, the second may not
                with pytest.raises(EngineDeadError, match="no replica is running"):
                    await said(model)
            with pytest.raises(EngineDeadError):
                model.check()
            serve.start("b", second)
            await until(lambda: len(model.replicas) == 1)
            assert await said(model) == "Two."
            model.check()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_who_waits_for_a_replica_ends_with_the_model() -> None:
    async with fake_model("One.", max_queue=2) as fake:
        serve = StandIn({"a": fake})
        async with opened(serve, replacement_seconds=3600) as model, anyio.create_task_group() as tasks:
            serve.kill("a")
            await until(lambda: not model.replicas)
            errors: list[Exception] = []

            async def ask() -> None:
                try:
                    await said(model)
                except PagedError as error:
                    errors.append(error)

            for _ in range(3):
                tasks.start_soon(ask)
            await until(lambda: len(errors) == 1)
            assert isinstance(errors[0], QueueFullError)
            assert errors[0].limit == 2
            await model.aclose()
            await until(lambda: len(errors) == 3)
            assert {type(each) for each in errors[1:]} == {ModelClosedError}


async def test_cancellation_reaches_the_replica() -> None:
    async with slow_fake() as fake, opened(StandIn({"a": fake})) as model:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(said, model)
            await until(lambda: fake.stats().running == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: not fake.stats().running)
        stream = model.stream_chat_request(hello())
        await anext(stream)
        await stream.aclose()
        await until(lambda: not fake.stats().running and not model.stats().running)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_closing_a_face_ends_its_own_requests_alone(drain: bool) -> None:
    async with slow_fake() as fake:
        reasons: dict[str, str | None] = {}

        async def ask(name: str, asked: Model) -> None:
            response = await asked.send_chat_request(hello(name))
            reasons[name] = response.choices[0].finish_reason

        async with opened(StandIn({"a": fake})) as other, anyio.create_task_group() as tasks:
            async with opened(StandIn({"a": fake})) as model:
                tasks.start_soon(ask, "own", model)
                tasks.start_soon(ask, "another's", other)
                await until(lambda: fake.stats().running == 2)
                if drain:
                    let_end(fake)
                await model.aclose(drain=drain)
            let_end(fake)
            await other.aclose(drain=True)
        assert reasons == {"own": "stop" if drain else "canceled", "another's": "stop"}
        fake.check()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_requests_of_a_silent_face_end() -> None:
    async with slow_fake() as fake:
        serve = StandIn({"a": fake}, silent_seconds=-1.0)
        async with opened(serve) as model, anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(EngineDeadError, match="link has ended"):
                    await said(model)

            tasks.start_soon(ask)
            await until(lambda: fake.stats().running == 1 and fake.stats().completion_tokens > 3)
            serve.loop.call_soon(serve.sessions("a").end_silent)
            await until(lambda: not fake.stats().running)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_that_is_dropped_lets_go_of_its_thread_and_requests() -> None:
    async with slow_fake() as fake:
        serve = StandIn({"a": fake})
        model = await connected(serve)
        stream = model.stream_chat_request(hello())
        await anext(stream)
        assert fake.stats().running == 1
        del model, stream
        gc.collect()
        await until(lambda: not fake.stats().running)
        await anyio.to_thread.run_sync(serve.loop.join)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet")
    make_checkpoint("llama", path / "base")
    write_adapter(path / "first", build_model("llama"), seed=0)
    return path


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_weights_grammars_and_adapters_go_along(directory: Path) -> None:
    builder = TextModelBuilder(directory / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)
    greedy = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
    prompt = list(range(5, 75))
    async with builder.build() as first, builder.build() as second:
        await first.load_adapter(directory / "first")
        expected = [
            (await first.send_completion_request(prompt, greedy, adapter=adapter)).choices[0].text
            for adapter in (None, "first")
        ]
        await first.unload_adapter("first")
        serve = StandIn({"a": first})
        async with opened(serve) as model:
            await model.load_adapter(directory / "first")
            serve.start("b", second)
            await until(lambda: len(model.replicas) == 2)
            assert second.adapters == ("first",)  # it came later
            serve.retire("a")
            await until(lambda: len(model.replicas) == 1)
            for adapter, text in zip((None, "first"), expected, strict=True):
                response = await model.send_completion_request(prompt, greedy, adapter=adapter)
                assert response.choices[0].text == text
            answer = await model.send_completion_request("x", greedy, constraint=Constraint.regex("[0-9]{3}"))
            assert answer.choices[0].text.isdigit()
            await model.unload_adapter("first")
            with pytest.raises(InvalidRequestError):
                await model.send_completion_request("x", greedy, adapter="first")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replicas_that_answer_nothing_are_an_error() -> None:
    async with fake_model("Hello!") as fake:
        serve = StandIn({"a": fake})
        serve.start("b", fake)
        serve.kill("a")
        serve.list_only("a")  # as a router does that has not heard of it yet: calls then go to the other one
        with pytest.raises(EngineDeadError, match="have died"):
            async with opened(serve):
                pass


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_error_while_a_replica_is_built_keeps_its_type() -> None:
    async with fake_model("Hello!") as fake:
        serve = StandIn({"a": fake})
        serve.start_in_vain("b", CheckpointError("config.json is not JSON"))
        with pytest.raises(CheckpointError, match="is not JSON"):
            async with opened(serve):
                pass
        with pytest.raises(CheckpointError):
            serve.sessions("b").end_silent()  # which is what Ray Serve asks a replica's health by


@pytest.mark.parametrize(
    ("builder", "num_replicas", "cluster", "kept"),
    [
        (TextModelBuilder("x"), 2, {"CPU": 8.0}, {"num_cpus": 4}),
        (TextModelBuilder("x"), 100, {"CPU": 8.0}, {"num_cpus": 1}),
        (TextModelBuilder("x").with_num_threads(3), 2, {"CPU": 8.0}, {"num_cpus": 3}),
        (TextModelBuilder("x"), 2, {"CPU": 8.0, "GPU": 2.0}, {"num_cpus": 1, "num_gpus": 1}),
        (TextModelBuilder("x").with_tensor_parallel(2), 2, {"CPU": 8.0, "GPU": 4.0}, {"num_cpus": 1, "num_gpus": 2}),
        (TextModelBuilder("x").with_force_cpu(), 2, {"CPU": 8.0, "GPU": 2.0}, {"num_cpus": 4}),
        (object(), 2, {"CPU": 8.0}, {"num_cpus": 1}),
        (TextModelBuilder("x"), 2, None, {"num_cpus": 1}),
        (TextModelBuilder("x").with_num_threads(3), 2, None, {"num_cpus": 3}),
        (TextModelBuilder("x").with_device("cuda"), 2, None, {"num_cpus": 1, "num_gpus": 1}),
    ],
)
def test_a_replica_gets_its_share(
    builder: object, num_replicas: int, cluster: dict[str, float] | None, kept: dict[str, float]
) -> None:
    assert resources_of(builder, num_replicas, cluster) == kept


class RayStandIn(ModuleType):
    """Stands in for the module ``ray``.

    :ivar cluster: the resources of the running cluster; None: Ray does not run
    """

    def __init__(self, cluster: dict[str, float] | None) -> None:
        super().__init__("ray")
        self.cluster = cluster

    def is_initialized(self) -> bool:
        return self.cluster is not None

    def cluster_resources(self) -> dict[str, float]:
        assert self.cluster is not None
        return self.cluster


@pytest.mark.parametrize(
    ("cluster", "given", "kept"),
    [
        ({"CPU": 8.0}, {}, {"num_cpus": 7}),
        ({"CPU": 8.0}, {"num_replicas": 2}, {"num_cpus": 3}),
        ({"CPU": 1.0}, {}, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 1.0}, {}, {"num_cpus": 1, "num_gpus": 1}),
        ({"CPU": 8.0, "GPU": 1.0}, {"ray_actor_options": {"num_cpus": 2}}, {"num_cpus": 2}),
        (None, {}, {"num_cpus": 1}),
    ],
)
def test_resources_are_those_of_the_running_cluster(
    cluster: dict[str, float] | None,
    given: dict[str, Any],
    kept: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", RayStandIn(cluster))
    with caplog.at_level("WARNING", "paged_sdk"):
        options = with_resources({"name": "engine", **given}, TextModelBuilder("x"), other_cpus=1)
    assert options == {"name": "engine", **given, "ray_actor_options": kept}
    assert ("Ray is not running yet" in caplog.text) is (cluster is None)


@pytest.mark.parametrize(
    ("silent_seconds", "given", "expected"),
    [
        (60, {}, (2.0, 20.0)),
        (3, {}, (1.0, 1.0)),
        (None, {}, (2.0, 1e9)),
        (60, {"health_check_period_s": 7, "health_check_timeout_s": 8}, (7, 8)),
    ],
)
def test_ray_serve_finds_silent_replicas(
    silent_seconds: float | None, given: dict[str, float], expected: tuple[float, float]
) -> None:
    limits = HangLimits(silent_seconds=silent_seconds)
    options = with_health_checks({"name": "engine", **given}, limits)
    assert options.pop("name") == "engine"
    assert options == dict(zip(("health_check_period_s", "health_check_timeout_s"), expected, strict=True))


@pytest.mark.parametrize("given", [60, {"step_seconds": 2}, True])
def test_limits_are_hang_limits(given: Any) -> None:
    for make in (
        lambda: RayReplicas(TextModelBuilder("x"), hang_limits=given),
        lambda: serve_app(TextModelBuilder("x"), model_name="x", hang_limits=given),
    ):
        with pytest.raises(ConfigError, match=r"hang_limits.*HangLimits or None"):
            make()


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'paged-sdk[ray]'")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, where it is imported
def test_an_application_has_the_limits_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_SDK_SILENT_SECONDS", "30")
    monkeypatch.setenv("PAGED_SDK_STEP_SECONDS", "none")

    def limits_of(hang_limits: HangLimits | None) -> tuple[float, float | None]:
        app: Any = serve_app(TextModelBuilder("x"), model_name="x", hang_limits=hang_limits)
        engine = app._bound_deployment.init_args[0]._bound_deployment
        return engine._deployment_config.health_check_timeout_s, engine.init_kwargs["step_seconds"]

    assert limits_of(None) == (10, None)
    assert limits_of(HangLimits(silent_seconds=12, step_seconds=5)) == (4, 5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'paged-sdk[ray]'")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, where it is imported
@pytest.mark.parametrize(
    ("cluster", "faces", "kept"),
    [
        (None, None, {"num_cpus": 1}),
        ({"CPU": 8.0}, None, {"num_cpus": 3}),
        ({"CPU": 8.0}, {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}, {"num_cpus": 4}),
        ({"CPU": 8.0, "GPU": 2.0}, None, {"num_cpus": 1, "num_gpus": 1}),
    ],
)
def test_the_replicas_of_an_application_get_their_share(
    cluster: dict[str, float] | None,
    faces: dict[str, Any] | None,
    kept: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: cluster is not None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    app: Any = serve_app(TextModelBuilder("x"), model_name="x", engines={"num_replicas": 2}, faces=faces)
    engine = app._bound_deployment.init_args[0]._bound_deployment
    assert engine.ray_actor_options == kept


def test_without_ray_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    for make in (lambda: RayReplicas(TextModelBuilder("x")), lambda: serve_app(TextModelBuilder("x"), model_name="x")):
        with pytest.raises(ConfigError, match=r"paged-sdk\[ray\]"):
            make()


async def test_an_error_in_the_loop_of_ray_goes_with_whoever_has_caught_it() -> None:
    async def fail() -> None:
        raise KnownError

    loop = RayLoop()
    try:
        await goes_when_caught(lambda: in_loop(loop, fail()))
    finally:
        loop.stop()
