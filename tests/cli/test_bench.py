"""``paged-sdk bench``: what it asks of a model, what it makes of the times, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import typer
from attrs import field, frozen
from typer.testing import CliRunner, Result

import tiny
from arrivals import gather
from paged_sdk import CompletionResponse, Model, ModelStats, ReplicaSet, SamplingParams, TextModelBuilder, Usage
from paged_sdk.cli import measuring
from paged_sdk.cli.app import app
from paged_sdk.cli.benchmark import Benchmark, _of_first
from paged_sdk.cli.loading import Builder, load
from paged_sdk.cli.measuring import Measurement, Speedometer, perplexity_of_sample
from paged_sdk.cli.tables import table
from paged_sdk.testing import fake_model

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--pa-context-len", "512", "--pa-block-size", "8")
SHORT = ("--prompt-len", "16", "--gen-len", "4", "--depth", "8", "--iterations", "2", "--warmup", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("bench"))


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


@frozen
class Clockwork:
    """Stands for a model that takes a second for a prompt, and then half a second for each token of a text."""

    asked: list[tuple[int, int | None]] = field(factory=list)

    @property
    def replicas(self) -> tuple[Clockwork, ...]:
        return (self,)

    def stats(self) -> ModelStats:
        return ModelStats()

    async def send_completion_request(self, prompt: list[int], sampling: SamplingParams) -> CompletionResponse:
        assert sampling.ignore_eos
        assert sampling.max_len is not None
        self.asked.append((len(prompt), sampling.max_len))
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=sampling.max_len,
            total_tokens=0,
            time_to_first_token_sec=1.0,
            total_completion_time_sec=0.5 * (sampling.max_len - 1),
        )
        return CompletionResponse(id="", choices=(), created=0, model="", usage=usage)


def test_rates_are_tokens_by_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork, runs = Clockwork(), list[None]()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: 7.0))  # all are asked for at once
    speedometer = Speedometer(
        cast(Model, clockwork), [1, 2], warmup=1, iterations=2, after_run=lambda: runs.append(None)
    )
    prompts = anyio.run(speedometer.prompts, 100)
    assert prompts.rates == (100.0, 100.0)
    assert clockwork.asked == [(100, 1)] * 3
    clockwork.asked.clear()

    async def texts() -> Measurement:
        return await speedometer.texts(9, streams=3, depth=5)

    measured = anyio.run(texts)
    assert clockwork.asked == ([(5, 1)] * 3 + [(5, 9)] * 3) * 3
    assert measured.median == 6.0  # 24 tokens after the first ones in 4 seconds
    assert len(runs) == 6


def test_prompts_are_new_and_texts_have_them_cached() -> None:
    async def main() -> None:
        async with fake_model("x" * 100) as model:
            speedometer = await Speedometer.of(model, warmup=0, iterations=3)
            await speedometer.prompts(64)
            stats = model.stats()
            assert (stats.prompt_tokens, stats.prefix_hits) == (3 * 64, 0)
            await speedometer.texts(8, streams=2, depth=64)
            assert len({each.prompt for each in model.requests}) == 3 + 3 * 2
            assert model.stats().prefix_hits >= 3 * 2 * 32

    anyio.run(main)


def test_each_replica_has_its_part() -> None:
    fakes = [fake_model("x" * 100) for _ in range(2)]
    max_len = 1
    runs: list[list[int]] = []

    def after_run() -> None:
        runs.append(
            [
                sum(each.sampling is not None and each.sampling.max_len == max_len for each in fake.requests)
                for fake in fakes
            ]
        )

    def parts(found: Measurement) -> tuple[float, ...]:
        """Return each one's part by how many requests it has got since the first run, which does not count. That
        depends on which of them was busy."""
        assert len(runs) == 3
        counts = [last - first for first, last in zip(runs[0], runs[-1], strict=True)]
        assert sum(counts) == 2 * found.streams
        runs.clear()
        return tuple(count / sum(counts) * found.median for count in counts)

    async def main() -> None:
        async with ReplicaSet(fakes) as model:
            nonlocal max_len
            speedometer = await Speedometer.of(model, warmup=1, iterations=2, after_run=after_run)
            prompts = await speedometer.prompts(64)
            assert prompts.streams == 2
            assert prompts.of_replicas == parts(prompts)
            assert sum(each.prompt_tokens for each in model.replica_stats()) == 2 * 3 * 64
            max_len = 8
            texts = await speedometer.texts(8, streams=4, depth=65)
            assert texts.of_replicas == parts(texts)

    anyio.run(main)


def test_the_sample_has_a_perplexity() -> None:
    async def main() -> float:
        async with fake_model("nothing of the sort") as model:
            return await perplexity_of_sample(model)

    assert anyio.run(main) > 2


def test_what_is_said_of_a_model(model: Path) -> None:
    result = bench(model, *FLAGS, *SHORT, "--streams", "1", "--streams", "3", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert [(each["kind"], each["streams"], each["tokens"]) for each in found["results"]] == [
        ("prompt", 1, 16),
        ("text", 1, 4),
        ("text", 3, 4),
    ]
    for each in found["results"]:
        assert len(each["tok_per_sec"]) == 2
        assert min(each["tok_per_sec"]) <= each["median_tok_per_sec"] <= max(each["tok_per_sec"])
    assert (found["num_threads"], found["preemptions"], found["model"]["num_blocks"]) == (1, 0, 64)
    assert found["machine"]["num_processors"] >= 1
    text = bench(model, *FLAGS, *SHORT, "--prompt-len", "0")
    assert text.exit_code == 0, text.output
    lines = text.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[-2:]] == ["text of 4 tokens", "4 texts of 4 tokens"]
    named = bench("plain", "-m", model, *FLAGS, *SHORT, "--prompt-len", "0", "--streams", "1")
    assert named.stdout.splitlines()[0].startswith(lines[0].partition(",")[0])
    assert any("1 thread, CPU kernels: " in line for line in lines)


def test_replicas_are_measured_together_and_each(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(builder: Builder, *, replicas: int) -> Model:
        return await ReplicaSet([builder] * replicas)  # in this process, which takes less time to start

    monkeypatch.setattr("paged_sdk.cli.benchmark.load", load)
    arguments = (*FLAGS, *SHORT, "--replicas", "2", "--streams", "2", "--depth", "17")
    result = bench(model, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["options"]["replicas"] == 2
    assert [(each["kind"], each["streams"]) for each in found["results"]] == [("prompt", 2), ("text", 2)]
    for each in found["results"]:
        assert len(each["tok_per_sec_of_replicas"]) == 2
        assert sum(each["tok_per_sec_of_replicas"]) == pytest.approx(each["median_tok_per_sec"])
    assert found["model"]["num_blocks"] == 128
    lines = bench(model, *arguments).stdout.splitlines()
    assert any("2 replicas, each of 1 thread" in line for line in lines)
    assert [line.split("  ")[0] for line in lines[-3:]] == ["of these", "2 prompts of 16 tokens", "2 texts of 4 tokens"]
    assert lines[-3].split()[-4:] == ["replica", "0", "replica", "1"]


def test_what_replicas_log_is_said_once() -> None:
    lines = ["replica 0: Paged.", "replica 1: Paged.", "here", "replica 12: Paged."]
    assert list(_of_first(lines)) == ["Paged.", "here"]


def test_replicas_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded:
        def __init__(self, sources: list[object], *, in_processes: bool) -> None:
            made.append((sources, in_processes))

        def __await__(self) -> Iterator[None]:
            yield from ()

    monkeypatch.setattr("paged_sdk.cli.loading.ReplicaSet", Recorded)
    builder = TextModelBuilder("somewhere")
    anyio.run(partial(load, builder, replicas=3))
    assert made == [([builder] * 3, True)]


def test_a_pool_that_is_too_small_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Speedometer.texts

    async def at_once(self: Speedometer, tokens: int, **settings: Any) -> Measurement:
        """Have all of them in the pool, however long it takes until each is asked for."""
        monkeypatch.setattr(measuring, "asyncio", SimpleNamespace(gather=partial(gather, self._model)))
        return await texts(self, tokens, **settings)

    monkeypatch.setattr(Speedometer, "texts", at_once)
    flags = ("--dtype", "float32", "--num-threads", "1", "--pa-context-len", "32", "--pa-block-size", "8")
    result = bench(model, *flags, "--prompt-len", "0", "--gen-len", "24", "--streams", "4", "--warmup", "0")
    assert result.exit_code == 0, result.output
    assert "the KV pool is too small" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--gen-len", "1"), 2, "--gen-len"),
        (("--streams", "4", "--max-seqs", "2"), 2, "expected at most --max-seqs, 2"),
        (("--streams", "5", "--max-seqs", "2", "--replicas", "2"), 2, "at most --max-seqs, 2 of each replica"),
        (("--replicas", "0"), 2, "--replicas"),
        (("-m", "x"), 2, "MODEL and --model-id exclude each other"),
        (("--arch", "phi3"), 2, "the model is of the family llama, not phi3"),
        (("--prompt-len", "9999"), 2, "for --prompt-len: 9999 tokens and one of an answer do not fit"),
        (("--depth", "9999"), 2, "for --depth: a prompt of 9999 tokens and a text of 4 do not fit"),
        (("--gen-len", "9999"), 2, "for --gen-len: a prompt of 8 tokens and a text of 9999 do not fit"),
    ],
)
def test_what_cannot_be_is_said(model: Path, arguments: tuple[str, ...], code: int, expected: str) -> None:
    result = bench(model, *FLAGS, *SHORT, *arguments)
    assert result.exit_code == code, result.output
    assert expected in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("40",), 40), (("8",), 32), (("8", "--max-seqs", "9"), 9), (("99", "--replicas", "3"), 33)],
)
def test_more_texts_than_usual_are_computed_at_once(
    arguments: tuple[str, ...], expected: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def of(builder: Builder, *_: object, **__: object) -> None:
        seen.append(builder.settings.max_num_seqs)
        raise typer.Exit

    monkeypatch.setattr(Benchmark, "of", of)
    assert bench(model, "--streams", *arguments).exit_code == 0
    assert seen == [expected]


def test_columns() -> None:
    assert list(table([("", "a"), ("long", "10.0"), ("x", "2.0")])) == ["         a", "long  10.0", "x      2.0"]
