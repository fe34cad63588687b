"""Every benchmark of this project runs, on a tiny model: that they find what they measure, not what they find."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import torch
from attrs import evolve
from benchmarks import claims, quick
from benchmarks.busy import Busy
from benchmarks.compare import Comparison
from benchmarks.environments import OWN
from benchmarks.gpu import timing
from benchmarks.gpu.__main__ import Findings, run_part
from benchmarks.gpu.parts import PARTS, Run
from benchmarks.gpu.random_model import TINY_SHAPES
from benchmarks.inside import OpenEngine, open_engine
from benchmarks.latent_cpu import LatentLayer
from benchmarks.mixture_cpu import Layers
from benchmarks.neighbours import neighbour_tasks
from benchmarks.process import EngineFailedError, EngineProcess
from benchmarks.prompts import PromptMaker
from benchmarks.protocol import EngineSettings, Prompt, UnsupportedError
from benchmarks.quality import batch_dependence, own_paths
from benchmarks.step_profile import Stopwatch, profile_steps
from benchmarks.tasks import LOAD, QUICK, make_tasks
from benchmarks.versions import Version
from benchmarks.worker import cpu_seconds

from native_weights import needs_library, workspace
from paged_sdk import TextModelBuilder
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.native.library import available_levels

ROOT: Final = Path(__file__).parents[1]


@pytest.fixture
def engine(builder: TextModelBuilder) -> OpenEngine:
    return open_engine(builder)


@pytest.fixture
def prompts(engine: OpenEngine) -> PromptMaker:
    return PromptMaker(engine.parts.text.tokenizer)


@pytest.fixture(scope="module")
def settings(tiny_checkpoint: Path) -> EngineSettings:
    return EngineSettings(str(tiny_checkpoint), num_threads=1, max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def own(settings: EngineSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    running = EngineProcess(OWN, settings, tmp_path_factory.mktemp("own") / "log", timeout=60)
    yield running
    running.close()


def test_a_comparison_has_a_figure_for_every_metric(
    settings: EngineSettings, prompts: PromptMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    comparison = Comparison(
        engines=[OWN], tasks=make_tasks(QUICK), sizes=QUICK, settings=settings, prompts=prompts, timeout=60
    )
    comparison.run_round(1)
    results = comparison.results
    assert not results.reasons
    assert results.metrics[0] is LOAD
    for metric in results.metrics:
        value = results.median(OWN, metric)
        assert value is not None
        assert value > 0, metric


@pytest.mark.skipif(sys.platform != "linux", reason="another process's CPU time is read by Linux's clocks")
def test_busy_processes_compute_while_they_are_asked_to_and_no_longer() -> None:
    with Busy(2) as busy:
        asked, other = busy.process_ids
        before, idle = cpu_seconds(asked), cpu_seconds(other)
        deadline = time.monotonic() + 60
        with busy.computing(1):
            while cpu_seconds(asked) < before + 0.1 and time.monotonic() < deadline:
                time.sleep(0.01)
        stopped = cpu_seconds(asked)
        assert stopped >= before + 0.1
        time.sleep(0.3)
        assert cpu_seconds(asked) - stopped < 0.1
        assert cpu_seconds(other) - idle < 0.1
    for process_id in (asked, other):
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


@pytest.mark.long
def test_engines_are_measured_beside_busy_processes_and_beside_themselves(
    settings: EngineSettings, prompts: PromptMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = f"{OWN} before"
    with Busy(2) as busy:
        tasks = [task for task in neighbour_tasks(QUICK, busy, turns=1) if not task.name.endswith("-4")]
        comparison = Comparison(
            engines=[before],
            tasks=tasks,
            sizes=QUICK,
            settings=settings,
            prompts=prompts,
            timeout=60,
            versions={before: ROOT / "src"},
        )
        comparison.run_round(1)
    results = comparison.results
    assert not results.reasons
    assert [task.name for task in tasks] == ["decode-1", "prefix", "idle-cpu", "one-process-1", "two-processes-1"]
    shares = [metric for metric in results.metrics if metric.unit == "x"]
    assert len(shares) == 6
    for metric in results.metrics:
        value = results.median(before, metric)
        assert value is not None
        assert value > 0, metric


def test_two_versions_take_turns(
    settings: EngineSettings, prompts: PromptMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = (Version("before", ROOT / "src"), Version("now", ROOT / "src"))
    with Busy(1) as busy:
        comparison = quick.Comparison(both, settings=settings, sizes=QUICK, prompts=prompts, busy=busy)
        comparison.start(0, time.monotonic())
    assert "decode_1_beside_1" in {metric.key for metric in comparison.metrics}
    for metric in comparison.metrics:
        (before,), (now,) = (values[metric.key] for values in comparison.values)
        assert comparison.ratios(metric) == [now / before if metric.higher_is_better else before / now]
    assert all(value > 0 for value in comparison.medians().values())


def test_times_are_in_order_and_count_every_token(own: EngineProcess, prompts: PromptMaker) -> None:
    batch = [prompts.make(8 + index, f"Prompt {index}") for index in range(3)]
    for prompt, times in zip(batch, own.generate(batch, 5), strict=True):
        assert 0 < times.first <= times.last
        assert (times.num_tokens, times.num_prompt_tokens) == (5, len(prompt.token_ids))


def test_what_an_engine_cannot_do_or_gets_wrong_is_said(own: EngineProcess) -> None:
    with pytest.raises(UnsupportedError, match="no logits"):
        own.ask("logits", token_ids=[1, 2], path="prefill", output="unused")
    with pytest.raises(EngineFailedError, match="InvalidRequestError"):
        own.generate([Prompt("", [10**6])], 1)


def test_an_engine_that_does_not_load_leaves_its_last_words(tmp_path: Path) -> None:
    nowhere = EngineSettings(str(tmp_path / "nothing.gguf"), num_threads=1, max_model_len=64, max_num_seqs=1)
    with pytest.raises(EngineFailedError, match=r"nothing\.gguf"):
        EngineProcess(OWN, nowhere, tmp_path / "log", timeout=60)


def test_an_engine_is_held_to_an_instruction_set_and_ended_when_it_does_not_answer(
    settings: EngineSettings, prompts: PromptMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with one engine of their own: to start it takes longer than all else here. Without AVX2 it is not held."""
    batch, isa = [prompts.make(8, "Prompt")], "avx2" if "avx2" in available_levels() else None
    held = EngineProcess(OWN, replace(settings, isa=isa), tmp_path / "log", timeout=60)
    try:
        assert isa is None or held.version.endswith(" (avx2)")
        assert len(held.generate(batch, 2)) == 1
        monkeypatch.setattr(held, "_timeout", 0)
        with pytest.raises(EngineFailedError, match="no answer"):
            held.generate(batch, 2)
        assert not held.is_alive
    finally:
        held.close()


def test_prompts_have_their_length_and_part_at_once(prompts: PromptMaker) -> None:
    first, second = prompts.make(40, "Round 1"), prompts.make(40, "Round 2")
    assert len(first.token_ids) == len(second.token_ids) == 40
    assert first.token_ids[:3] != second.token_ids[:3]
    assert prompts.make(40, "Round 1") == first
    longer = prompts.extend(first, 8, "More")
    assert longer.token_ids[:40] == first.token_ids
    assert len(longer.token_ids) == 48


def test_every_path_in_float32_agrees_with_prefill(builder: TextModelBuilder, prompts: PromptMaker) -> None:
    token_ids = prompts.make(48, "Text").token_ids
    (_, expected), *others = own_paths(builder, token_ids, streams=3)
    assert len(others) == 2
    for name, logits in others:
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3, msg=name)


def test_greedy_texts_are_compared(engine: OpenEngine, prompts: PromptMaker) -> None:
    batch = [prompts.make(16, f"Text {index}").token_ids for index in range(3)]

    async def compare() -> None:
        async with engine.start() as model:
            found = await batch_dependence(model, batch, 8)
            assert found.texts == 3
            assert 0 <= found.different <= 3

    asyncio.run(compare())


@pytest.mark.parametrize("paged", [True, False])
def test_the_profile_counts_every_second_of_a_step_once(
    builder: TextModelBuilder, prompts: PromptMaker, *, paged: bool
) -> None:
    builder = builder if paged else builder.without_paged_attn()
    batch = [prompts.make(8, f"Prompt {index}").token_ids for index in range(2)]

    async def profiled(num_tokens: int) -> Stopwatch:
        engine, stopwatch = open_engine(builder), Stopwatch()
        with stopwatch.watching(engine):
            async with engine.start() as model:
                await profile_steps(model, stopwatch, batch, num_tokens)
        return stopwatch

    # Who reads late, as on a busy machine, sees the last steps only.
    for num_tokens in (24, 100, 500, 1500):
        stopwatch = asyncio.run(profiled(num_tokens))
        if stopwatch.steps > 10:
            break
    assert 10 < stopwatch.steps <= num_tokens
    # Over paged KV the layers may be fused: then attention and most products are parts of the decoder's one call.
    expected = {"schedule", "sampler", "worker: publish", *(() if paged else ("attention", "norms"))}
    assert expected <= stopwatch.seconds.keys()
    assert any(part.startswith("linears: ") for part in stopwatch.seconds)
    assert all(seconds > 0 for seconds in stopwatch.seconds.values())


def test_the_claims_are_measured(builder: TextModelBuilder) -> None:
    sizes = claims.QUICK
    measured = [
        *claims.paged_attention(builder, sizes),
        *claims.prefix_cache(builder, sizes),
        *claims.fp8_kv(builder, sizes),
    ]
    # A float32 model does not differ from itself.
    assert all(claim.with_feature > 0 and (claim.without > 0 or "mean KL" in claim.title) for claim in measured)
    tokens = next(claim for claim in measured if claim.title.startswith("FP8 KV: tokens"))
    # Four bytes of float32 against one of FP8 and its share of a four-byte scale per token and head.
    assert tokens.gain is not None
    assert 2 < tokens.gain < 4


@needs_library
def test_quantizing_while_loading_is_measured(builder: TextModelBuilder) -> None:
    (claim,) = claims.in_situ_quantization(builder, claims.QUICK)
    assert claim.gain == pytest.approx(claim.with_feature / claim.without)


def test_the_prefix_cache_costs_time_and_memory() -> None:
    first_use, second_use, memory = claims.prefix_cache_cost(claims.QUICK)
    assert memory.without < 50 < memory.with_feature < 1000
    # Which of them takes longer is for quiet machines: here it was the other way round once in twelve times.
    assert 0 < first_use.with_feature < 1e6
    assert 0 < second_use.with_feature < 1e6


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("transformers") else ())
        for name, part in PARTS.items()
        if not part.needs_gpu and name != "mixed_steps"
    ],
)
def test_whole_engines_on_a_gpu_are_measured(name: str, tmp_path: Path) -> None:
    """On the CPU and tiny, but for what only CUDA has."""
    rows = list(PARTS[name].rows(Run(device=torch.device("cpu"), directory=tmp_path, dry=True)))
    assert not [row for row in rows if "error" in row]
    cases = [row["case"] for row in rows]
    assert {"decode, 1 stream after 16 tokens", "decode, 4 streams", "first token of 128 tokens"} <= set(cases)
    assert not [row for row in rows for unit in ("us", "tok_per_s") if not row.get(unit, 1.0) > 0]


def test_steps_with_a_prompt_in_each_are_measured(tmp_path: Path) -> None:
    rows = list(PARTS["mixed_steps"].rows(Run(device=torch.device("cpu"), directory=tmp_path, dry=True)))
    case = "3 decodes beside a prompt of 8"
    recorded, launched, compiled = rows
    assert [recorded["case"], launched["case"]] == [f"{case}, recorded", f"{case}, launched"]
    for row in (recorded, launched):
        assert row["us"] * row["tok_per_s"] == pytest.approx(3e6)
        # How many depends on whether tasks that send are faster than steps; a step has room for one, but for the ends.
        assert 0 < row["reference"]["prompts per step"] <= 1.2
    assert compiled["reference"] == {"count": 0}


def test_launches_are_counted_by_the_names_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cudaGraphLaunch", "cuLaunchKernelEx", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord", "gemm"]

    class Profile:
        def __init__(self, activities: object) -> None:
            pass

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=name) for name in names]

    counts: Counter[str] = Counter()
    with timing.count_launches(counts):  # where there is no device
        pass
    assert not counts
    monkeypatch.setattr(timing, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with timing.count_launches(counts):
        pass
    assert counts == {"graphs": 1, "kernels": 2, "copies": 1}


def test_a_part_that_fails_or_hangs_keeps_what_it_found(tmp_path: Path) -> None:
    found = Findings()
    row = {"kernel": "k", "case": "c", "us": 1.0}
    script = f"import sys, json; print(json.dumps({row}), file=open(sys.argv[1], 'w'), flush=True); "
    endings = {"good": "", "bad": "sys.exit('no GPU')", "hung": "import time; time.sleep(600)"}
    for name, ending in endings.items():
        # The one that hangs has to have begun by then, however busy the machine is.
        for limit in (2, 10, 60) if name == "hung" else (120,):
            run_part(name, [sys.executable, "-c", script + ending], limit, found, tmp_path)
            if found.rows[name]:
                break
        assert [row["us"] for row in found.rows[name]] == [1.0]
        assert found.table(name).row_count == 1
        assert (tmp_path / f"{name}.jsonl").exists()
    assert list(found.problems) == ["bad", "hung"]
    assert "no GPU" in found.problems["bad"]
    assert f"ended after {limit} s" in found.problems["hung"]
    found.write(tmp_path / "found.json", {"device": "none"})
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == found.rows


#: Leaves a process that may write to a pipe.
LEAVES: Final = """
import os, subprocess, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)
os.write(pipe, b"begun")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[pipe])
"""


@pytest.mark.parametrize("ending", ["", "sys.exit('no GPU')"])
def test_what_a_part_has_started_ends_with_it(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run_part("leaves", [sys.executable, "-c", LEAVES + ending, str(path)], 120, Findings(), tmp_path)
        os.set_blocking(pipe, True)
        assert select.select([pipe], [], [], 60)[0]
        assert os.read(pipe, 100) == b"begun"
        assert select.select([pipe], [], [], 60)[0], "somebody may write yet"
        assert os.read(pipe, 100) == b""
    finally:
        os.close(pipe)


@needs_library
def test_latent_attention_is_timed_in_every_way() -> None:
    sizes = LatentAttentionConfig(rank=64, rope_dim=16, nope_dim=32, value_dim=32)
    layer = LatentLayer(workspace(), sizes, 3, max_context_len=90)
    for num_tokens, count in ((40, 6), (1, 3)):
        ways = layer.ways(num_tokens, 90)
        assert len(ways) == count
        assert all(seconds() > 0 for seconds in ways.values())


@needs_library
def test_layers_with_experts_are_timed_in_both_ways() -> None:
    tiny = TINY_SHAPES["qwen3_moe"]
    # Rows of Q4_K are blocks of 256.
    layers = Layers(evolve(tiny, config={**tiny.config, "moe_intermediate_size": 256}), workspace(), num_tokens=128)
    for step in ((2, 1, 5), (1, 40)):
        figures = layers.measure(*step)
        assert 0 < figures.experts < figures.separate
        assert figures.fused > 0
