"""Several models as one: where requests go, and what becomes of them when a replica dies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import httpx2
import pytest

from adapter_files import write_adapter
from paged_sdk import (
    BlockingModel,
    ConfigError,
    Conversation,
    EngineDeadError,
    InvalidRequestError,
    Model,
    ModelClosedError,
    ModelStats,
    QueueFullError,
    ReplicaSet,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.calls import preparation
from paged_sdk.kv import paged
from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.routing.replica import Replica
from paged_sdk.server import create_app
from paged_sdk.testing import FakeModel, FakeRequest, fake_model
from paged_sdk.worker.engine_access import EngineAccess
from slow_fakes import SLOW_TEXT, let_end, slow_fake
from talk import LONG, hello, said, until
from tiny import build_model, make_checkpoint

pytestmark = pytest.mark.anyio


def broken() -> Exception:
    return RuntimeError("the device is gone")


def counts(fakes: Sequence[FakeModel]) -> list[int]:
    return [len(fake.requests) for fake in fakes]


async def test_it_answers_as_any_model() -> None:
    async with ReplicaSet([fake_model("Hello!") for _ in range(3)]) as model:
        assert isinstance(model, Model)
        assert await said(model, hello()) == "Hello!"
        response = await model.send_completion_request(["a", "b"], SamplingParams(n_choices=2))
        assert [choice.text for choice in response.choices] == ["Hello!"] * 4
        assert response.usage.completion_tokens == 28
        vectors = await model.embed(["aab", "b"])
        assert [len(each) for each in vectors.embeddings] == [258, 258]
        assert (await model.score(["Hello!"], prefix="x")).scores[0].is_greedy
        assert [each.choices[0].message.content for each in await model.send_chat_requests([hello()] * 5)] == [
            "Hello!"
        ] * 5
        assert model.stats().completion_tokens == sum(each.completion_tokens for each in model.replica_stats())
        assert model.stats().blocks_total == 3 * 4096
        assert model.config.max_queue == 3 * 4096
    with pytest.raises(ModelClosedError):
        await said(model, hello())


async def test_a_prompt_is_named_once_for_the_router_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    named: dict[str, list[bytes]] = {}
    for module in (preparation, paged):

        def note(*args: Any, place: str = module.__name__, **options: Any) -> list[bytes]:
            hashes = block_hashes(*args, **options)
            named.setdefault(place, []).extend(hashes)
            return hashes

        monkeypatch.setattr(module, "block_hashes", note)
    request = hello("A prompt of some length. " * 20, cache_salt="mine")
    async with ReplicaSet([fake_model("An answer of some length. " * 10) for _ in range(2)]) as model:
        assert await said(model, request) == await said(model, request)
        assert model.stats().prefix_hits > 400
    ours, engines = (named[module.__name__] for module in (preparation, paged))
    assert len(ours) > 2 * len(set(ours)) - 1 > 20  # the same ones twice
    assert engines  # of the answers
    assert not set(ours) & set(engines)


async def test_conversations_stay_and_tenants_spread() -> None:
    fakes = [fake_model("Yes.") for _ in range(4)]
    async with ReplicaSet(fakes) as model:
        talks = [Conversation(model, system=f"You serve tenant {tenant}. " * 20) for tenant in range(8)]
        for turn in range(3):
            for talk in talks:
                await talk.send(f"Question {turn}")
        assert counts(fakes) == [6, 6, 6, 6]
        hits = [each.prefix_hit_rate for each in model.replica_stats()]
    async with fake_model("Yes.") as alone:
        for tenant in range(8):
            talk = Conversation(alone, system=f"You serve tenant {tenant}. " * 20)
            for turn in range(3):
                await talk.send(f"Question {turn}")
        assert min(hits) >= 0.95 * alone.stats().prefix_hit_rate


async def test_salts_are_tenants_too() -> None:
    fakes = [fake_model("Yes.") for _ in range(2)]
    async with ReplicaSet(fakes) as model:
        for _ in range(3):
            await said(model, hello("The same long question. " * 20, cache_salt="a"))
            await said(model, hello("The same long question. " * 20, cache_salt="b"))
        salts = [{request.options.cache_salt for request in fake.requests} for fake in fakes]
        assert salts in ([{"a"}, {"b"}], [{"b"}, {"a"}])


async def test_requests_at_once_are_shared_out() -> None:
    all_have_come = threading.Event()

    def answer(request: FakeRequest) -> str:
        assert all_have_come.wait(20)
        return "Yes."

    fakes = [fake_model(answer) for _ in range(4)]
    async with ReplicaSet(fakes) as model, anyio.create_task_group() as tasks:
        tasks.start_soon(model.send_chat_requests, [hello(f"{n}") for n in range(16)])
        await until(lambda: len(model._routed._live) == 16)
        all_have_come.set()
    assert counts(fakes) == [4, 4, 4, 4]


async def test_what_was_not_heard_of_is_sent_elsewhere_when_a_replica_dies() -> None:
    dying = [fake_model(error=broken()) for _ in range(2)]
    async with ReplicaSet([*dying, fake_model("Still here.")]) as model:
        responses = await model.send_chat_requests([hello(f"{n}") for n in range(9)])
        assert {each.choices[0].message.content for each in responses} == {"Still here."}
        response = await model.send_completion_request(["a", "b", "c"])
        assert [choice.text for choice in response.choices] == ["Still here."] * 3
        assert len((await model.embed(["a"])).embeddings) == 1
        model.check()


async def test_what_has_been_heard_ends_with_the_error_and_the_text_so_far() -> None:
    fakes = [fake_model("Half a", delay=0.002, error=broken()), fake_model("Whole.")]
    async with ReplicaSet(fakes) as model:
        async with model.stream_chat_request(hello()) as stream:
            texts: list[str] = []

            async def read() -> None:
                async for chunk in stream:
                    texts.extend(choice.delta.content for choice in chunk.choices)

            with pytest.raises(EngineDeadError) as caught:
                await read()
        assert caught.value.__cause__ is not None
        assert caught.value.partial_response is not None
        assert caught.value.partial_response.choices[0].message.content == "Half a"  # type: ignore[union-attr]
        assert "".join(texts) == "Half a"
        assert [await said(model, hello()) for _ in range(3)] == ["Whole."] * 3
        assert counts(fakes) == [1, 3]


async def test_the_last_death_is_everybodys() -> None:
    async with ReplicaSet([fake_model(error=broken()) for _ in range(2)]) as model:
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await said(model, hello())
        with pytest.raises(EngineDeadError):
            model.check()


async def test_of_a_dead_replica_what_it_has_counted_is_left() -> None:
    dying = fake_model("Half a text.", error=broken())
    async with ReplicaSet([dying, fake_model("Whole.")]) as model:
        assert model.stats().blocks_total == 2 * 4096
        with pytest.raises(EngineDeadError):
            await said(model, hello())
        await said(model, hello())
        stats, counted = model.stats(), dying.stats()
        assert (stats.blocks_total, stats.blocks_used + stats.blocks_cached + stats.blocks_free) == (4096, 4096)
        assert stats.completion_tokens == counted.completion_tokens + len("Whole.") + 1
        assert counted.completion_tokens > 0
        assert counted.prompt_tok_per_sec > 0
        assert stats.prompt_tok_per_sec == model.replica_stats()[1].prompt_tok_per_sec


async def test_a_replica_that_is_closed_is_left_out() -> None:
    fakes = [fake_model("one"), fake_model("two")]
    async with ReplicaSet(fakes) as model:
        await fakes[0].aclose()
        assert await said(model, hello()) == "two"
        await model.reset_prefix_cache()
        assert await said(model, hello()) == "two"


async def test_of_a_closed_replica_no_free_blocks_are_counted() -> None:
    first, second = slow_fake(), fake_model("Two.")
    async with ReplicaSet([first, second]) as model, anyio.create_task_group() as tasks:
        await second.aclose()
        assert (model.stats().blocks_total, model.stats().blocks_free) == (4096, 4096)
        tasks.start_soon(said, model, hello())
        await until(lambda: first.stats().running == 1)
        tasks.start_soon(lambda: first.aclose(drain=True))
        await until(lambda: model.stats().blocks_free == 0)
        stats = model.stats()
        assert (stats.running, stats.blocks_total) == (1, stats.blocks_used + stats.blocks_cached)
        assert 0 < stats.blocks_used < 4096
        let_end(first)


async def test_replicas_come_and_go() -> None:
    first, second = slow_fake(), fake_model("Two.")
    async with second, ReplicaSet([first]) as model:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(said, model, hello())
            await until(lambda: model.stats().running == 1)
            insides = second._insides
            assert model._routed.add(Replica(insides.worker, insides.adapters, 4096)) == 1
            assert await said(model, hello("Another?")) == "Two."
            model._routed.remove(0)
            model._routed.remove(0)
            assert await said(model, hello()) == "Two."
            let_end(first)
        assert first.stats().completion_tokens == len(SLOW_TEXT) + 1  # what it had under way went on to its end
        assert counts([first, second]) == [1, 2]
        tokens = model.stats().completion_tokens
        assert model.stats().blocks_total == 4096
        model._routed.remove(1)
        assert model.stats().completion_tokens == tokens >= 10
        with pytest.raises(EngineDeadError, match="no replica"):
            await said(model, hello())


class LookedAt:
    """Is an engine's worker, whose figures somebody looks at."""

    def __init__(self, worker: Any, look: Callable[[], object]) -> None:
        self._worker = worker
        self._look = look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @property
    def stats(self) -> ModelStats:
        self._look()
        stats: ModelStats = self._worker.stats
        return stats


async def test_what_was_counted_is_there_while_a_replica_goes() -> None:
    first, second = fake_model("One."), fake_model("Two.")
    async with second, ReplicaSet([first]) as model:
        await said(model, hello())
        seen: list[int] = []
        have_looked = threading.Event()

        def scrape() -> None:
            seen.append(model.stats().completion_tokens)
            have_looked.set()

        threads: list[threading.Thread] = []

        def look() -> None:
            if not threads:
                threads.append(threading.Thread(target=scrape))
                threads[0].start()
                have_looked.wait(0.2)

        insides = second._insides
        leaving = cast(EngineAccess, LookedAt(insides.worker, look))
        await said(second, hello())
        number = model._routed.add(Replica(leaving, insides.adapters, 4096))
        model._routed.remove(number)
        threads[0].join()
        assert seen == [model.stats().completion_tokens]
        assert seen[0] > first.stats().completion_tokens


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_full_queue_sends_requests_on() -> None:
    fakes = [fake_model(LONG, delay=0.001, max_num_seqs=1, max_queue=queue) for queue in (1, 50)]
    async with ReplicaSet(fakes) as model, anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(said, model, hello(f"{number}", sampling=SamplingParams(max_len=5)))
    assert sum(counts(fakes)) == 12
    fakes = [slow_fake(max_num_seqs=1, max_queue=1) for _ in range(2)]
    async with ReplicaSet(fakes) as model:
        errors = []

        async def ask(number: int) -> None:
            try:
                await said(model, hello(f"{number}"))
            except QueueFullError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(ask, number)
            await until(lambda: len(errors) >= 8)  # two run, and two wait
            let_end(*fakes)


async def test_cancellation_reaches_the_replica() -> None:
    async with ReplicaSet([slow_fake() for _ in range(2)]) as model:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.send_chat_requests, [hello("a"), hello("b")])
            await until(lambda: model.stats().running == 2)
            tasks.cancel_scope.cancel()
        await until(lambda: not model.stats().running and not model.stats().blocks_used)
        assert [model._routed._router.load(replica) for replica in range(2)] != [0, 0]  # told before the next request
        stream = model.stream_chat_request(hello())
        await anext(stream)
        assert sum(each.running for each in model.replica_stats()) == 1
        assert sum(model._routed._router.load(replica) for replica in range(2)) == 32
        del stream
        gc.collect()
        await until(lambda: not model.stats().running)
        with pytest.raises(RequestTimeoutError):
            await said(model, hello(timeout=0.02))
        assert not model._routed._live


@pytest.mark.parametrize("drain", [False, True])
async def test_closing_ends_all_replicas(drain: bool) -> None:
    fakes = [slow_fake() for _ in range(2)]
    model = await ReplicaSet(fakes)
    reasons = []

    async def ask(text: str) -> None:
        response = await model.send_chat_request(hello(text))
        reasons.append(response.choices[0].finish_reason)

    async with anyio.create_task_group() as tasks:
        for text in "abcd":
            tasks.start_soon(ask, text)
        await until(lambda: model.stats().running == 4)
        if drain:
            let_end(*fakes)
        await model.aclose(drain=drain)
    assert reasons == ["stop" if drain else "canceled"] * 4
    for fake in fakes:
        with pytest.raises(ModelClosedError):
            fake.check()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_server_takes_it() -> None:
    app = create_app({"fake": lambda: ReplicaSet([fake_model("Hello!") for _ in range(2)])})
    async with app.lifespan():
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "fake", "messages": [{"role": "user", "content": "Hi!"}]}
            answers = [await client.post("/v1/chat/completions", json=body) for _ in range(3)]
            assert [each.json()["choices"][0]["message"]["content"] for each in answers] == ["Hello!"] * 3
            assert (await client.get("/health")).status_code == 200


def test_synchronous_code_has_it_too() -> None:
    with BlockingModel(ReplicaSet([fake_model("Hello!"), fake_model("Hello!")])) as model:
        response = model.send_chat_request(hello())
        assert response.choices[0].message.content == "Hello!"


@pytest.mark.parametrize("value", [[], "ab", 5, [5], [None]])
async def test_what_is_no_model_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ReplicaSet(value)


async def test_a_builder_that_fails_leaves_no_model_open() -> None:
    class Failing:
        async def build(self) -> Model:
            raise RuntimeError("no such checkpoint")

    models = [fake_model("Hello!"), fake_model("Hello!")]
    with pytest.raises(RuntimeError, match="no such checkpoint"):
        await ReplicaSet([models[0], Failing(), models[1]])
    for model in models:
        with pytest.raises(ModelClosedError):
            model.check()


async def test_a_replica_that_cannot_be_closed_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [fake_model("Hello!") for _ in range(3)]
    model = await ReplicaSet(fakes)

    async def failing(*, drain: bool = False) -> None:
        raise RuntimeError("it holds on")

    with monkeypatch.context() as patch:
        patch.setattr(fakes[0], "aclose", failing)
        with pytest.raises(RuntimeError, match="it holds on"):
            await model.aclose()
    for fake in fakes[1:]:
        with pytest.raises(ModelClosedError):
            fake.check()
    await fakes[0].aclose()


async def test_models_that_differ_are_refused_and_closed() -> None:
    fakes = [fake_model("a"), fake_model("a", max_model_len=100)]
    with pytest.raises(ConfigError, match="max_model_len"):
        await ReplicaSet(fakes)
    with pytest.raises(ModelClosedError):
        fakes[0].check()
    async with fake_model("a") as fake:
        with pytest.raises(ConfigError, match="once"):
            ReplicaSet([fake, fake])
    one = ReplicaSet([fake_model("a")])
    async with one, anyio.create_task_group():
        with pytest.raises(ConfigError, match="used already"):
            await one


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas")
    make_checkpoint("llama", path / "base")
    for seed, name in enumerate(("first", "second")):
        write_adapter(path / name, build_model("llama"), seed=seed)
    return path


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_weights_and_adapters_give_what_one_model_gives(directory: Path) -> None:
    builder = TextModelBuilder(directory / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)
    greedy = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
    prompts = [list(range(start, start + 70)) for start in range(5, 9)]
    async with builder.build() as alone:
        await alone.load_adapter(directory / "second")
        expected = [
            (await alone.send_completion_request(prompt, greedy, adapter=adapter)).choices[0].text
            for prompt in prompts
            for adapter in (None, "second")
        ]
    async with ReplicaSet([builder, builder]) as model:
        await model.replicas[0].load_adapter(directory / "first")  # so that the numbers of adapters differ
        await model.replicas[0].unload_adapter("first")
        await model.load_adapter(directory / "second")
        assert model.adapters == ("second",)
        texts = [
            (await model.send_completion_request(prompt, greedy, adapter=adapter)).choices[0].text
            for prompt in prompts
            for adapter in (None, "second")
        ]
        assert texts == expected
        assert all(each.completion_tokens for each in model.replica_stats())
        await model.replicas[1].load_adapter(directory / "first")
        with pytest.raises(ConfigError):  # the second has it already: the first gets rid of it again
            await model.load_adapter(directory / "first")
        assert model.adapters == ("second",)
        await model.unload_adapter("second")
        with pytest.raises(InvalidRequestError):
            await model.send_completion_request("x", greedy, adapter="second")
