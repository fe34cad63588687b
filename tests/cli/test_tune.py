"""``paged-sdk tune``: what it tries, how it chooses, and the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from typer.testing import CliRunner, Result

import tiny
from paged_sdk import MemoryGpuConfig, MemoryPlan, OutOfMemoryError, PagedCacheType, plan_memory
from paged_sdk.cli import serving, tuning
from paged_sdk.cli.app import app
from paged_sdk.cli.loading import AnyBuilder
from paged_sdk.cli.measuring import Measurement
from paged_sdk.cli.options import ModelOptions
from paged_sdk.cli.tuning import best_threads, best_type, numbers_of_threads
from paged_sdk.cli.tuning_report import Trial, command_line
from paged_sdk.kernels.native import library

FLAGS = ("--dtype", "float32", "--streams", "2", "--context-len", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("tune"))


def tune(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], env={"COLUMNS": "200"})


def trial(
    *, isq: str | None = None, threads: int = 1, perplexity: float = 10.0, prompt: float = 100.0, text: float = 10.0
) -> Trial:
    return Trial(
        isq=isq,
        num_threads=threads,
        weight_bytes=1,
        perplexity=perplexity,
        prompt=Measurement(kind="prompt", streams=1, tokens=128, rates=(prompt,)),
        text=Measurement(kind="text", streams=2, tokens=8, rates=(text,)),
    )


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each trial be over at once."""

    async def tried(self: object, options: ModelOptions, *_: object) -> Trial:
        return trial(isq=options.isq, threads=options.num_threads or 1)

    monkeypatch.setattr(tuning.Tuner, "_trial", tried)


def test_the_time_of_chats_counts_prompts_and_answers() -> None:
    assert trial(prompt=100.0, text=10.0).chat_seconds == 2 * (512 / 100 + 128 / 10)


def test_the_fastest_type_that_is_good_enough_is_chosen() -> None:
    stored = trial()
    large, small = trial(isq="Q8_0", text=15.0, perplexity=10.1), trial(isq="Q4K", text=20.0, perplexity=10.6)
    trials = [stored, large, small]
    assert best_type(trials, max_loss=0.03) is large
    assert best_type(trials, max_loss=0.10) is small
    assert best_type(trials, max_loss=0.0) is stored
    nearly = trial(isq="Q6K", text=15.1, perplexity=10.2)
    assert best_type([stored, large, nearly], max_loss=0.03) is large


def test_no_more_threads_are_chosen_than_help() -> None:
    assert [numbers_of_threads(each) for each in (1, 2, 4, 16)] == [[1], [2, 1], [4, 3, 2], [16, 12, 8]]
    many, few = trial(threads=8, text=10.1), trial(threads=4, text=10.0)
    assert best_threads([many, few]) is few
    assert best_threads([evolve(many, text=evolve(many.text, rates=(11.0,))), few]).num_threads == 8


def test_a_command_line_can_be_typed() -> None:
    settings = {"model_id": "a b", "cpu": True, "quantized_file": ("x", "y"), "pa_cache_type": PagedCacheType.F8E4M3}
    assert command_line(settings) == (
        "paged-sdk serve --model-id 'a b' --cpu --quantized-file x --quantized-file y --pa-cache-type f8e4m3"
    )


def test_a_model_is_tried_and_its_file_can_be_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library.available_levels():
        pytest.skip("Q8_0 needs the native kernels")
    file = tmp_path / "tuned.json"
    monkeypatch.chdir(model.parent)
    result = tune(model.name, *FLAGS, "--try", "8", "--max-loss", "1000", "--json", "--emit-config", file)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert [each["isq"] for each in found["types"]] == [None, "Q8_0"]
    assert found["types"][1]["weight_bytes"] < found["types"][0]["weight_bytes"] * 0.95
    assert all(each["perplexity"] > 1 and each["chat_seconds"] > 0 for each in found["types"])
    assert [each["num_threads"] for each in found["threads"]] == numbers_of_threads(found["machine"]["num_processors"])
    said = {each["option"]: each["value"] for each in found["suggestions"]}
    assert (said["--pa-context-len"], said["--max-seqs"]) == (128, 2)
    words = [word for option, value in said.items() for word in (option, str(value))]
    assert found["command"].split() == ["paged-sdk", "serve", "--model-id", model.name, "--dtype", "float32", *words]

    seen: list[AnyBuilder] = []
    monkeypatch.setattr(serving, "keep_serving", lambda models, *_, **__: seen.append(models[0].builder))
    monkeypatch.chdir(tmp_path)
    for arguments in (["from-config", str(file)], ["serve", "--config", str(file)]):
        served = CliRunner().invoke(app, arguments)
        assert served.exit_code == 0, served.output
    monkeypatch.chdir(model.parent)
    assert CliRunner().invoke(app, [*found["command"].split()[1:]]).exit_code == 0
    assert seen[0] == seen[1]
    assert seen[1].settings == seen[2].settings
    assert seen[1].source.location == str(model)
    settings = seen[1].settings
    assert (settings.max_num_seqs, settings.dtype) == (2, "float32")
    assert settings.paged_meta is not None
    assert settings.paged_meta.gpu_memory == MemoryGpuConfig.ContextSize(128)


def test_what_is_given_is_not_tried(model: Path) -> None:
    result = tune(model, *FLAGS, "--num-threads", "1", "--isq", "8" if library.available_levels() else "INT8")
    assert result.exit_code == 0, result.output
    options = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("--")]
    assert options == ["--pa-context-len", "--max-seqs"]
    assert "threads  " not in result.stdout
    assert "--num-threads 1" in result.stdout.splitlines()[-1]


@pytest.mark.usefixtures("no_runs")
def test_types_that_cannot_be_are_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(builder: AnyBuilder) -> MemoryPlan:
        if builder.settings.isq is None:
            raise OutOfMemoryError("too large")
        return plan_memory(builder)

    monkeypatch.setattr(tuning, "plan_memory", plan)
    result = tune(model, *FLAGS, "--num-threads", "1", "--try", "INT8")
    assert result.exit_code == 0, result.output
    assert "as they are: not tried, too large" in result.stdout
    assert "--isq INT8: as they are, the weights do not fit" in result.stdout
    monkeypatch.setattr(tuning, "plan_memory", plan_memory)
    nothing = tune(model, *FLAGS, "--num-threads", "1", "--try", "F8_0")
    assert nothing.exit_code == 2
    assert "--try" in nothing.stderr


@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        ({PagedCacheType.F8E4M3: 128}, {"--pa-context-len": "128", "--pa-cache-type": "f8e4m3"}),
        ({PagedCacheType.F8E4M3: 96, PagedCacheType.AUTO: 48}, {"--pa-context-len": "96", "--pa-cache-type": "f8e4m3"}),
    ],
)
def test_a_cache_that_does_not_fit_is_smaller(
    fits: dict[PagedCacheType, int], expected: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(builder: AnyBuilder) -> MemoryPlan:
        meta = builder.settings.paged_meta
        if meta is not None:
            room = fits.get(meta.cache_type, 32)
            assert isinstance(meta.gpu_memory, MemoryGpuConfig.ContextSize)
            if meta.gpu_memory.tokens > room:
                raise OutOfMemoryError("too large", largest_context=room)
        return plan_memory(builder)

    monkeypatch.setattr(tuning, "plan_memory", plan)
    result = tune(model, *FLAGS, "--num-threads", "1", "--isq", "INT8")
    assert result.exit_code == 0, result.output
    lines = [line.partition(": ")[0].partition(" ") for line in result.stdout.splitlines() if line.startswith("--")]
    assert {option: value for option, _, value in lines} == {**expected, "--max-seqs": "2"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--emit-config", "there.json"), "--emit-config"),
        (("--emit-config", "new.yaml"), "ends in .json"),
        (("--emit-config", "no/such/new.json"), "a new file"),
        (("--try", "4", "--isq", "8"), "--try and --isq exclude each other"),
        (("--context-len", "999999"), "--context-len"),
        (("--streams", "0"), "--streams"),
        (("--arch", "phi3"), "of the family llama"),
    ],
)
def test_what_cannot_be_is_said(
    arguments: tuple[str, ...], expected: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.json").touch()
    monkeypatch.chdir(tmp_path)
    result = tune(model, "--dtype", "float32", "--num-threads", "1", *arguments)
    assert result.exit_code == 2, result.output
    assert expected in " ".join(result.stderr.replace("│", " ").split())
