"""``paged-sdk doctor``: the machine, a plan of a model's memory, and what a loaded model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from paged_sdk import ConfigError, GgufModelBuilder, TextModelBuilder, TextSpeculativeBuilder, plan_memory
from paged_sdk.build import kv_memory, machine, planning, weight_form
from paged_sdk.build.ranks import ranks
from paged_sdk.cli.app import app
from paged_sdk.cli.diagnosis import machine_lines
from paged_sdk.kernels.native import library
from paged_sdk.kernels.triton import availability
from paged_sdk.kv.pool_size import DeviceMemory

MIB = 2**20
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--pa-block-size", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("doctor"))


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def found(*arguments: str | Path) -> dict[str, Any]:
    result = doctor(*arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_the_machine() -> None:
    said = found()["machine"]
    assert tuple(said["kernel_levels"]) == library.available_levels()
    assert said["kernel_level"] == next(iter(library.available_levels()), None)
    assert said["versions"]["torch"] == torch.__version__
    assert 0 < said["free_mib"] <= said["memory_mib"]
    text = doctor()
    assert f"{said['memory_mib']} MiB" in text.stdout
    assert "CPU kernels" in text.stdout


def test_the_processor_is_read_as_linux_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some 9000\nflags\t\t: fpu avx2 fma amx_int8\n\nprocessor\t: 1\n")
    assert machine._processor(file) == ("Some 9000", ("avx2", "fma", "amx_int8"))
    file.write_text("processor\t: 0\nFeatures\t: fp asimddp i8mm\n")
    assert machine._processor(file)[1] == ("asimddp", "i8mm")
    assert machine._processor(tmp_path / "missing")[1] == ()


def test_devices_and_what_is_missing_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "why_not", lambda: "it was not built")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old One")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 30, 4 << 30))
    monkeypatch.setattr(availability, "why_not", lambda _: "it is too old")
    report = machine.describe_machine()
    lines = list(machine_lines(report))
    assert "CPU kernels: torch's, because it was not built" in lines
    expected = (
        "cuda:0: Old One, compute capability 7.5, 4096 MiB, of which 3072 MiB are free; torch's kernels, because it is "
        "too old"
    )
    assert expected in lines


def test_a_plan_is_what_the_built_model_has(model: Path) -> None:
    plan = found("--plan", model, *FLAGS, "--ctxt-len", "1000")["plan"]
    loaded = found(model, *FLAGS, "--pa-ctxt-len", "1000")["model"]
    assert plan["num_blocks"] == loaded["num_blocks"] == 125
    assert plan["architecture"] == loaded["architecture"] == "llama"
    assert plan["model_type"] == loaded["model_type"] == "llama"
    assert any(line.startswith("Attention: ") for line in loaded["decisions"])
    assert f"KV pool: 125 blocks of 8 tokens, {plan['kv_bytes'] / 2**20:.1f} MiB (auto)." in loaded["decisions"]
    stored = load_file(model / "model.safetensors")
    assert plan["weight_bytes"] == sum(tensor.numel() * 4 for tensor in stored.values())


def test_a_plan_of_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    """Two ranks hold the same head then, each for queries of its own."""
    model = tiny.make_checkpoint("llama", tmp_path, num_attention_heads=4, num_key_value_heads=2)
    builder = TextModelBuilder(model).with_force_cpu()
    one, two, four = (plan_memory(builder.with_tensor_parallel(ranks)).bytes_per_token for ranks in (1, 2, 4))
    assert two == one
    assert four == 2 * one


def test_a_plan_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its heads alone, and its share of the weights; the one with the least room for them decides."""
    model = tiny.make_checkpoint("llama", tmp_path, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    free = [60 * MIB, 25 * MIB]
    monkeypatch.setattr(ranks, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(planning, "choose_devices", lambda settings: (torch.device("cuda", 0),))
    monkeypatch.setattr(
        kv_memory, "device_memory", lambda device: DeviceMemory(total=100 * MIB, free=free[device.index])
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(weight_form, "_why_no_blocks", lambda *_: "there is no such device")
    builder = TextModelBuilder(model).with_dtype("float32")
    one, two = (plan_memory(builder.with_tensor_parallel(size)) for size in (1, 2))
    assert (one.devices, two.devices) == (("cuda:0",), ("cuda:0", "cuda:1"))
    assert two.weight_bytes == one.weight_bytes
    assert two.bytes_per_token == one.bytes_per_token
    assert one.num_blocks == blocks_in(50 * MIB - one.weight_bytes, one.bytes_per_token)
    # The first rank has two of the three key-value heads, the second one.
    shares = ((50 * MIB, 2 / 3), (15 * MIB, 1 / 3))
    rooms = [blocks_in(room - one.weight_bytes // 2, share * one.bytes_per_token) for room, share in shares]
    assert two.num_blocks == min(rooms) < one.num_blocks
    free[1] = 60 * MIB
    assert plan_memory(builder.with_tensor_parallel(2)).num_blocks == rooms[0] > one.num_blocks


def blocks_in(room: int, bytes_per_token: float) -> int:
    return int(room // round(32 * bytes_per_token))


def test_a_plan_of_other_forms(model: Path, tmp_path: Path) -> None:
    dense = plan_memory(TextModelBuilder(model).with_dtype("float32"))
    fp8 = found("--plan", model, *FLAGS, "--pa-cache-type", "f8e4m3")["plan"]
    assert fp8["bytes_per_token"] < dense.bytes_per_token / 2
    contiguous = doctor("--plan", model, "--dtype", "float32", "--no-paged-attn")
    assert "KV cache: not paged" in contiguous.stdout
    file = tiny.make_gguf(tmp_path)
    stored = plan_memory(GgufModelBuilder(file))
    assert stored.weight_bytes <= file.stat().st_size
    assert plan_memory(GgufModelBuilder(file).with_dtype("float32")).weight_bytes > stored.weight_bytes


@pytest.mark.parametrize("isq", ["Q4K", "Q8_0", "HQQ4", "NF4", "INT8"])
def test_a_plan_of_quantized_weights_is_smaller(model: Path, isq: str) -> None:
    if not library.available_levels():
        pytest.skip("types of groups need the native kernels")
    dense = plan_memory(TextModelBuilder(model).with_dtype("float32"))
    plan = found("--plan", model, *FLAGS, "--isq", isq)["plan"]
    assert plan["isq"] == isq
    assert plan["weight_bytes"] < dense.weight_bytes * 0.6


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (("--ctxt-len", "999999999"), 1, "the largest that fits is --pa-context-len "),
        (("--ctxt-len", "8", "--pa-context-len", "8"), 2, "exclude each other"),
        (("--isq", "Q9"), 2, "--isq"),
        (("--dtype", "float3"), 2, "--dtype"),
    ],
)
def test_what_cannot_be_is_said(model: Path, flags: tuple[str, ...], code: int, expected: str) -> None:
    result = doctor("--plan", model, *flags)
    assert result.exit_code == code, result.output
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_one_model_at_a_time(model: Path) -> None:
    assert doctor(model, "--plan", model).exit_code == 2


@pytest.mark.parametrize(
    "flags", [("--isq", "99"), ("--ctxt-len", "8"), ("--max-seqs", "4"), ("--cpu",), ("-a", "llama")]
)
def test_options_of_a_model_need_one(flags: tuple[str, ...]) -> None:
    result = doctor(*flags)
    assert result.exit_code == 2, result.output
    assert f"{'--arch' if flags[0] == '-a' else flags[0]}: it needs a model" in " ".join(result.stderr.split())


def test_no_draft_model_is_planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = TextSpeculativeBuilder(TextModelBuilder(model), TextModelBuilder(model))
    with pytest.raises(ConfigError, match=r"^draft = .* plans do not include"):
        plan_memory(draft)
    monkeypatch.setenv("MISTRALRS_SPECULATIVE_DRAFT_MODEL", str(model))
    with pytest.raises(ConfigError, match=r"^MISTRALRS_SPECULATIVE_DRAFT_MODEL = .* plans do not include"):
        plan_memory(TextModelBuilder(model))
    assert plan_memory(TextModelBuilder(model).with_speculation(None)).num_blocks
