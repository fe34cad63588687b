"""Medians, ratios and divergences, judged by plain arithmetic."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from attrs import evolve
from benchmarks import environments, versions
from benchmarks.divergence import divergence
from benchmarks.environments import ENGINES, OWN, engines_for, python_of
from benchmarks.machine import describe_machine
from benchmarks.quick import interval, verdict
from benchmarks.results import Results
from benchmarks.saved import Saved, file_of, last_saved, save
from benchmarks.tasks import Metric
from benchmarks.versions import VersionError, last_tag, other_version
from benchmarks.worker import engine_class

SPEED = Metric("speed", "speed", "tok/s")
LATENCY = Metric("latency", "latency", "ms", higher_is_better=False)


@pytest.fixture
def results() -> Results:
    results = Results([SPEED, LATENCY], engines={OWN: "1", f"{OWN}_torch": "1", "slow": "2", "fast": "3"})
    for own, fast in ((30.0, 20.0), (10.0, 10.0), (90.0, 60.0)):
        results.add(OWN, {"speed": own, "latency": 2.0})
        results.add(f"{OWN}_torch", {"speed": 1000.0, "latency": 0.1})
        results.add("fast", {"speed": fast, "latency": 3.0})
    results.add("slow", {"speed": 1.0})
    results.add_reason("slow", [LATENCY], "no clock")
    return results


def test_ratios_are_of_medians_against_the_best_peer(results: Results) -> None:
    speed, latency = results.ratio(SPEED), results.ratio(LATENCY)
    assert speed is not None
    assert (speed.peer, speed.value) == ("fast", 30.0 / 20.0)
    assert latency is not None
    assert (latency.peer, latency.value) == ("fast", 3.0 / 2.0)


def test_without_a_figure_there_is_no_ratio(results: Results) -> None:
    assert results.median("slow", LATENCY) is None
    assert Results([SPEED], engines={OWN: "1"}).ratio(SPEED) is None


def test_the_report_holds_rounds_medians_and_reasons(results: Results) -> None:
    speed, latency = results.as_json()["metrics"]
    assert speed["rounds"]["fast"] == [20.0, 10.0, 60.0]
    assert speed["median"] == {OWN: 30.0, f"{OWN}_torch": 1000.0, "slow": 1.0, "fast": 20.0}
    assert latency["reasons"] == {"slow": "no clock"}


def test_every_engine_file_says_what_it_needs_without_its_packages() -> None:
    assert ENGINES[0] == OWN
    assert [name for name in ENGINES if not engine_class(name).REQUIREMENTS] == [OWN, f"{OWN}_torch"]


def test_a_package_built_for_one_instruction_set_has_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engines_for(None) == ENGINES
    assert engines_for("avx2") == (OWN, "llama_cpp")
    assert engines_for("sse9") == ()
    assert python_of(OWN, "avx2") == python_of(OWN)
    assert [python_of("llama_cpp", isa).parents[1].name for isa in (None, "avx2")] == ["llama_cpp", "llama_cpp-avx2"]
    with pytest.raises(SystemExit, match="no such engine that can be held to avx2: vllm_cpu; there are paged_sdk, lla"):
        environments.main(["vllm_cpu"], "avx2")


def test_divergence_is_the_sum_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, logits = (torch.randn(130, 17, generator=generator) * 3 for _ in range(2))
    expected, agree = [], 0
    for p_row, q_row in zip(reference.tolist(), logits.tolist(), strict=True):
        p_sum, q_sum = (math.fsum(map(math.exp, row)) for row in (p_row, q_row))
        expected.append(
            math.fsum(
                math.exp(p) / p_sum * (p - math.log(p_sum) - q + math.log(q_sum))
                for p, q in zip(p_row, q_row, strict=True)
            )
        )
        agree += p_row.index(max(p_row)) == q_row.index(max(q_row))
    found = divergence(reference, logits)
    assert found.mean_kl == pytest.approx(sum(expected) / 130, rel=1e-6)
    assert found.top1 == pytest.approx(agree / 130)
    assert divergence(reference, reference).mean_kl == 0


def test_a_version_is_called_slower_only_where_chance_makes_no_such_rounds() -> None:
    rng = random.Random(3)
    noise = [rng.gauss(1.0, 0.05) for _ in range(16)]
    assert verdict(interval(noise)) == ""
    assert verdict(interval([0.9 * ratio for ratio in noise])) == "slower"
    assert verdict(interval([1.1 * ratio for ratio in noise])) == "faster"
    assert verdict(interval([0.98] * 16)) == "", "less than what other layouts of the same code make"
    assert verdict(interval([0.9, 0.91, 0.92, 0.93, 0.94])) == "", "five on one side are no rarity"
    found = interval(noise)
    assert found.low < statistics.median(noise) == found.middle < found.high


def test_versions_that_cannot_be_had_are_named() -> None:
    with pytest.raises(VersionError, match="no-such-revision"):
        other_version("no-such-revision")


def test_without_a_tag_the_commit_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    monkeypatch.setattr(versions, "_REPOSITORY", tmp_path)
    with pytest.raises(VersionError, match=r"no commit has a tag yet.*--against"):
        last_tag()
    subprocess.run([*git, "tag", "v1"], check=True)
    assert last_tag() == "v1"


def test_what_was_saved_last_is_found_by_processor_and_model(tmp_path: Path) -> None:
    zen4 = describe_machine() | {"cpu": "AMD EPYC", "cpu_family": "25.17", "cpus": 2}
    path = file_of(zen4, tmp_path / "results")
    assert path.name == "amd-epyc-25-17-2-cpus.json"
    assert path != file_of(zen4 | {"cpu_family": "26.2"}, tmp_path / "results")
    assert last_saved(path, "a.gguf") is None
    old, new = Saved("abc", "2026-11-20", 0.1, {"decode_1": 100.0}), Saved("def", "2026-11-22", 0.2, {"decode_1": 90.0})
    save(path, zen4, "a.gguf", old)
    save(path, zen4, "b.gguf", evolve(old, figures={"decode_1": 5.0}))
    save(path, zen4, "a.gguf", new)
    assert last_saved(path, "a.gguf") == new
    assert last_saved(path, "c.gguf") is None
    again = evolve(old, day="2026-11-23")
    save(path, zen4, "a.gguf", again)
    assert last_saved(path, "a.gguf") == again
    assert last_saved(path, "b.gguf") == evolve(old, figures={"decode_1": 5.0})


def test_llama_cpp_is_built_without_amx() -> None:
    kind = engine_class("llama_cpp")
    assert kind.build_variables({"avx2", "avx512f"}) == {}
    assert "GGML_NATIVE=OFF" in kind.build_variables({"avx2", "amx_int8"})["CMAKE_ARGS"]
    assert engine_class("vllm_cpu").build_variables({"amx_int8"}) == {}
