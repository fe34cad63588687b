"""The command line, up to what it builds: help, parsing, and what each flag means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from attrs import evolve, field, frozen
from typer.testing import CliRunner

import paged_sdk
from paged_sdk import (
    GgufModelBuilder,
    ImageLimits,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    VisionModelBuilder,
    embedded_model_path,
)
from paged_sdk.cli import talk
from paged_sdk.cli.app import app
from paged_sdk.cli.loading import AnyBuilder, Builder, check_arch
from paged_sdk.cli.terminal import Terminal
from paged_sdk.cli.text_options import PromptOptions

GREEDY = SamplingParams.deterministic()


@frozen
class CommandLine:
    """Runs command lines with nobody to talk to.

    :ivar calls: what would have been built and said, a tuple for each run that came that far
    """

    calls: list[tuple[AnyBuilder, PromptOptions, SamplingParams]] = field(factory=list)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run a command and return what it showed."""
        result = CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.output

    def parsed(self, *arguments: str) -> tuple[AnyBuilder, PromptOptions, SamplingParams]:
        self(*arguments)
        return self.calls.pop()

    def talk(
        self,
        builder: AnyBuilder,
        flags: PromptOptions,
        sampling: SamplingParams,
        terminal: Terminal,
        *,
        arch: str | None = None,
    ) -> None:
        self.calls.append((builder, flags, sampling))


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    commands = CommandLine()
    monkeypatch.setattr(talk, "talk", commands.talk)
    return commands


def test_nothing_but_a_prompt(command_line: CommandLine) -> None:
    builder, flags, sampling = command_line.parsed("Hello!")
    assert builder == GgufModelBuilder(embedded_model_path())
    assert flags == PromptOptions(prompt="Hello!")
    assert sampling == GREEDY


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prefix-cache-n", "0"], lambda b: b.with_prefix_cache_n(0)),
        (["--max-seqs", "3"], lambda b: b.with_max_num_seqs(3)),
        (["--max-num-batched-tokens", "64"], lambda b: b.with_max_num_batched_tokens(64)),
        (["--max-seq-len", "100"], lambda b: b.with_max_model_len(100)),
        (["--adapter", "some/adapter"], lambda b: b.with_adapter("some/adapter")),
        (["--adapter", "own=some/adapter"], lambda b: b.with_adapter("some/adapter", name="own")),
        (["--speculate"], lambda b: b.with_speculation(SpeculativeConfig())),
        (["--speculate", "5"], lambda b: b.with_speculation(SpeculativeConfig(5))),
        (["--mtp"], lambda b: b.with_speculation(SpeculativeConfig(mtp=True))),
        (["--speculate", "5", "--mtp"], lambda b: b.with_speculation(SpeculativeConfig(5, mtp=True))),
        (["--speculate", "--cpu"], lambda b: b.with_speculation(SpeculativeConfig()).with_force_cpu()),
        (["--hf-revision", "v1"], lambda b: b.with_hf_revision("v1")),
        (["--token-source", "env:TOKEN"], lambda b: b.with_token_source("env:TOKEN")),
        (["--max-slowdown", "2.5"], lambda b: b.with_max_slowdown(2.5)),
        (["--batch-invariance"], lambda b: b.with_batch_invariance()),
        (["--throughput-logging"], lambda b: b.with_throughput_logging()),
        (["--num-threads", "2"], lambda b: b.with_num_threads(2)),
        (["--tensor-parallel", "2"], lambda b: b.with_tensor_parallel(2)),
        (["--tensor-parallel", "auto"], lambda b: b.with_tensor_parallel("auto")),
        (["--cpu"], lambda b: b.with_force_cpu()),
        (["--device", "cuda:1"], lambda b: b.with_device("cuda:1")),
        (["--imatrix", "a.dat"], lambda b: b.with_imatrix("a.dat")),
        (["--calibration-file", "a.txt"], lambda b: b.with_calibration_file("a.txt")),
        (["--prefix-cache-dir", "kept"], lambda b: b.with_prefix_cache_dir("kept")),
        (
            ["--prefix-cache-dir", "kept", "--prefix-cache-dir-mb", "5"],
            lambda b: b.with_prefix_cache_dir("kept", 5 << 20),
        ),
        (["--isq-cache", "kept"], lambda b: b.with_isq_cache("kept")),
        (["--dtype", "f32"], lambda b: b.with_dtype("float32")),
        (["--verbose"], lambda b: b.with_logging()),
        (["--chat-template", "{{ 1 }}"], lambda b: b.with_chat_template("{{ 1 }}")),
        (["-t", "some/tokenizer.json"], lambda b: b.with_tok_model_id("some/tokenizer.json")),
        (["--paged-attn", "off"], lambda b: b.without_paged_attn()),
        (["--no-paged-attn"], lambda b: b.without_paged_attn()),
        (["--paged-attn", "on"], lambda b: b.with_paged_attn(PagedAttentionMeta())),
        (["--paged-attn", "auto"], lambda b: b),
    ],
)
def test_flags_of_the_engine(
    command_line: CommandLine, arguments: list[str], expected: Callable[[Any], Builder]
) -> None:
    builder, _, _ = command_line.parsed("-m", "some/model", "Hello!", *arguments)
    assert builder == expected(TextModelBuilder("some/model"))


def test_an_image_encoder_makes_it_a_gguf_model(command_line: CommandLine) -> None:
    builder, _, _ = command_line.parsed("-m", "some/model", "--mmproj", "mmproj-F16.gguf", "Hello!")
    assert builder == GgufModelBuilder("some/model").with_mmproj("mmproj-F16.gguf")
    named = ["-f", "model.gguf", "-f", "mmproj-F16.gguf"]
    builder, _, _ = command_line.parsed("-m", "some/model", *named, "--image", __file__, "Hello!")
    assert builder == GgufModelBuilder("some/model", ["model.gguf", "mmproj-F16.gguf"]).with_image_limits(ImageLimits())


@pytest.mark.parametrize(("arguments", "gamma"), [([], 16), (["--speculate", "4"], 4)])
def test_a_draft_model(command_line: CommandLine, arguments: list[str], gamma: int) -> None:
    builder, _, _ = command_line.parsed("-m", "some/model", "--draft-model", "a/small.gguf", "Hello!", *arguments)
    target = TextModelBuilder("some/model")
    assert isinstance(builder, TextSpeculativeBuilder)
    assert (
        builder.settings
        == TextSpeculativeBuilder(
            target.with_speculation(SpeculativeConfig(gamma)),
            GgufModelBuilder("a/small.gguf"),
            SpeculativeConfig(gamma),
        ).settings
    )


def test_a_draft_model_beside_one_that_takes_images(command_line: CommandLine) -> None:
    """It may be an assistant, which reads what the other has made of them."""
    builder, _, _ = command_line.parsed("-m", "some/model", "--image", __file__, "--draft-model", "a/small", "Hello!")
    assert isinstance(builder, TextSpeculativeBuilder)
    assert isinstance(builder.target_builder, VisionModelBuilder)


@pytest.mark.parametrize("draft", ["org/small-GGUF:Q4_K_M", "folder"])
def test_a_draft_model_is_a_gguf_model_where_a_model_would_be(
    command_line: CommandLine, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    builder, _, _ = command_line.parsed("-m", "some/model", "--draft-model", draft, "Hello!")
    assert builder.settings.draft is not None
    assert builder.settings.draft.model == GgufModelBuilder(draft).source


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--pa-context-len", "512"], {"gpu_memory": MemoryGpuConfig.ContextSize(512)}),
        (["--pa-memory-mb", "8192"], {"gpu_memory": MemoryGpuConfig.MB(8192)}),
        (["--pa-memory-fraction", "0.95"], {"gpu_memory": MemoryGpuConfig.Fraction(0.95)}),
        (["--pa-gpu-mem", "8192"], {"gpu_memory": MemoryGpuConfig.MB(8192)}),
        (["--pa-gpu-mem-usage", ".95"], {"gpu_memory": MemoryGpuConfig.Fraction(0.95)}),
        (["--pa-block-size", "16"], {"block_size": 16}),
        (["--pa-blk-size", "16"], {"block_size": 16}),
        (["--pa-cache-type", "F8E4M3"], {"cache_type": PagedCacheType.F8E4M3}),
        (["--paged-attn", "on", "--pa-cache-type", "auto"], {"cache_type": PagedCacheType.AUTO}),
    ],
)
def test_flags_of_paged_attention(command_line: CommandLine, arguments: list[str], changes: dict[str, Any]) -> None:
    builder, _, _ = command_line.parsed("-m", "some/model", "Hello!", *arguments)
    assert builder == TextModelBuilder("some/model").with_paged_attn(evolve(PagedAttentionMeta(), **changes))


@pytest.mark.parametrize(
    ("arguments", "today"),
    [
        (
            "-i --pa-gpu-mem 8192 --pa-blk-size 32 --isq Q4K plain -m some/model -a phi3",
            "run -i --pa-memory-mb 8192 --pa-block-size 32 --isq Q4K --format plain -m some/model",
        ),
        (
            "run -i --pa-gpu-mem-usage .95 --pa-blk-size 32 gguf -m some/model-GGUF -f a.Q4_K_M.gguf",
            "run -i --pa-memory-fraction 0.95 --pa-block-size 32 --format gguf -m some/model-GGUF -f a.Q4_K_M.gguf",
        ),
        ("run -i --paged-attn --cpu", "run -i --paged-attn on --cpu"),
        ("run -i --paged-attn", "run -i --paged-attn on"),
        ("run -i --paged-attn off --model some/model", "run -i --paged-attn off -m some/model"),
        ("run --model some/model plain", "run -m some/model -- plain"),
        ("run --system plain -m some/model Hello", "run -m some/model --system=plain Hello"),
    ],
)
def test_command_lines_of_mistralrs_mean_the_same(command_line: CommandLine, arguments: str, today: str) -> None:
    said = []
    for line in (arguments, today):
        result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        said.append(command_line.calls.pop())
    assert said[0] == said[1]


NAMES_OF_FAMILIES = {
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "gemma2": "gemma2",
    "glm4moelite": "glm4_moe_lite",
    "gpt_oss": "gpt_oss",
    "phi2": "phi",
    "phi3": "phi3",
    "phi3.5moe": "phimoe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "Starcoder2": "starcoder2",
}
"""How mistral.rs's command line calls a family -> its ``model_type``."""


@pytest.mark.parametrize("arch", NAMES_OF_FAMILIES)
def test_families_have_mistralrs_s_names(arch: str) -> None:
    check_arch(NAMES_OF_FAMILIES[arch], arch)
    with pytest.raises(typer.BadParameter, match=f"the model is of the family llama, not {arch}"):
        check_arch("llama", arch)


def test_what_follows_a_flag_without_its_value_is_the_prompt(command_line: CommandLine) -> None:
    expected = TextModelBuilder("some/model").with_speculation(SpeculativeConfig())
    for arguments in (["--speculate", "Hello!"], ["--speculate", "--", "7"], ["--", "--speculate"]):
        builder, flags, _ = command_line.parsed("-m", "some/model", *arguments)
        assert builder == (TextModelBuilder("some/model") if arguments[0] == "--" else expected)
        assert flags == PromptOptions(prompt=arguments[-1])


def test_gguf_is_recognized(command_line: CommandLine, tmp_path: Path) -> None:
    plain, gguf = tmp_path / "plain", tmp_path / "gguf"
    for directory in (plain, gguf):
        directory.mkdir()
    (plain / "config.json").touch()
    (gguf / "model.gguf").touch()
    parts = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for arguments, expected in (
        (["-m", "some/model"], TextModelBuilder("some/model")),
        (["-m", str(plain)], TextModelBuilder(plain)),
        (["-m", str(gguf)], GgufModelBuilder(gguf)),
        (["-m", str(gguf / "model.gguf")], GgufModelBuilder(gguf / "model.gguf")),
        (["-m", "some/model:Q4_K_M"], GgufModelBuilder("some/model:Q4_K_M")),
        (["-m", "some/model", "--format", "gguf"], GgufModelBuilder("some/model")),
        (["-m", "some/model", "-f", "a.gguf"], GgufModelBuilder("some/model", ["a.gguf"])),
        (["-m", str(plain), "-f", parts[0], "-f", parts[1]], GgufModelBuilder(plain, parts)),
        (["-m", str(gguf), "--format", "plain"], TextModelBuilder(gguf)),
    ):
        builder, _, _ = command_line.parsed("Hello!", *arguments)
        assert builder == expected


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        (["--max-tokens", "5"], evolve(GREEDY, max_len=5)),
        (["--temperature", "0.7"], SamplingParams(temperature=0.7)),
        (["--seed", "3", "--max-tokens", "5"], SamplingParams(seed=3, max_len=5)),
        (["--top-k", "4", "--top-p", "0.5", "--min-p", "0.1"], SamplingParams(top_k=4, top_p=0.5, min_p=0.1)),
    ],
)
def test_flags_of_sampling(command_line: CommandLine, arguments: list[str], sampling: SamplingParams) -> None:
    assert command_line.parsed("Hello!", *arguments)[2] == sampling


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pa-memory-mb", "1", "--pa-context-len", "1"], ("--pa-context-len", "--pa-memory-mb")),
        (["--pa-memory-mb", "1", "--pa-memory-fraction", ".1"], ("--pa-memory-mb", "--pa-memory-fraction")),
        (["--pa-context-len", "1", "--pa-memory-fraction", ".1"], ("--pa-context-len", "--pa-memory-fraction")),
        (["--pa-memory-mb", "1", "--pa-gpu-mem", "1"], ("--pa-memory-mb", "--pa-gpu-mem")),
        (["--pa-gpu-mem", "1", "--pa-gpu-mem-usage", ".1"], ("--pa-gpu-mem", "--pa-gpu-mem-usage")),
        (["--pa-block-size", "8", "--pa-blk-size", "8"], ("--pa-block-size", "--pa-blk-size")),
        (["--paged-attn", "off", "--pa-memory-mb", "1"], ("--paged-attn off", "--pa-memory-mb")),
        (["--paged-attn", "off", "--pa-block-size", "8"], ("--paged-attn off", "--pa-block-size")),
        (["--no-paged-attn", "--pa-cache-type", "auto"], ("--no-paged-attn", "--pa-cache-type")),
        (["--no-paged-attn", "--paged-attn", "on"], ("--paged-attn on", "--no-paged-attn")),
        (["--cpu", "--device", "cuda"], ("--cpu", "--device")),
        (["--verbose", "--quiet"], ("--verbose", "--quiet")),
        (["--imatrix", "a.dat", "--calibration-file", "a.txt"], ("--imatrix", "--calibration-file")),
        (["--format", "plain", "-f", "a.gguf"], ("--format plain", "--quantized-file")),
        (["--mtp", "--draft-model", "a.gguf"], ("--mtp", "--draft-model")),
    ],
)
def test_flags_that_exclude_each_other(command_line: CommandLine, arguments: list[str], named: tuple[str, str]) -> None:
    assert "{} and {} exclude each other".format(*named) in command_line("Hello!", *arguments, code=2)
    assert not command_line.calls


@pytest.mark.parametrize(
    "arguments", [["--interactive", "--raw"], ["--raw", "--system", "Be brief."]], ids=["interactive", "system"]
)
def test_raw_text_is_no_conversation(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", "Hello!", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "exclude each other" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--paged-attn=maybe"], "--paged-attn"),
        (["--pa-cache-type", "int4"], "--pa-cache-type"),
        (["--format", "ggml"], "--format"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--isq-type", "Q4K"], "--isq-type"),
        (["one prompt", "another"], "another"),
    ],
)
def test_command_lines_that_cannot_be_understood(command_line: CommandLine, arguments: list[str], named: str) -> None:
    assert named in command_line("Hello!", *arguments, code=2)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--pa-block-size", "0"),
        ("--pa-blk-size", "0"),
        ("--pa-memory-mb", "0"),
        ("--pa-gpu-mem", "0"),
        ("--pa-context-len", "-1"),
        ("--pa-memory-fraction", "1.5"),
        ("--pa-gpu-mem-usage", "nan"),
        ("--isq", "Q99"),
        ("--max-seqs", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-seq-len", "0"),
        ("--prefix-cache-n", "-1"),
        ("--num-threads", "1000000"),
        ("--dtype", "int3"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-k", "-2"),
        ("--min-p", "2"),
        ("--seed", "-1"),
        ("--max-tokens", "0"),
        ("--model-id", ""),
        ("--tok-model-id", ""),
        ("--hf-revision", ""),
        ("--token-source", "pocket"),
        ("--max-slowdown", "1"),
        ("--chat-template", ""),
        ("--device", ""),
        ("--adapter", ""),
        ("--quantized-file", ""),
    ],
)
def test_values_that_cannot_be_used(command_line: CommandLine, flag: str, value: str) -> None:
    today = {
        "--pa-blk-size": "--pa-block-size",
        "--pa-gpu-mem": "--pa-memory-mb",
        "--pa-gpu-mem-usage": "--pa-memory-fraction",
    }.get(flag, flag)
    shown = command_line("Hello!", flag, value, code=2)
    assert f"Invalid value for {today}: " in shown
    assert "expected" in shown
    assert "Traceback" not in command_line("Hello!", "--verbose", flag, value, code=2)


def test_a_file_is_no_plain_checkpoint(command_line: CommandLine) -> None:
    for arguments in ([], ["-m", str(embedded_model_path())]):
        assert "--format plain" in command_line("Hello!", "--format", "plain", *arguments, code=2)


def test_a_bad_environment_is_not_the_command_line_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRALRS_PAGED_ATTN", "maybe")
    result = CliRunner().invoke(app, ["run", "Hello!"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: MISTRALRS_PAGED_ATTN = 'maybe'")


def test_flags_are_shown_without_a_value() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    for flag in ("--verbose", "--quiet", "--raw", "--interactive", "--cpu", "--version"):
        (line,) = (line for line in shown.splitlines() if flag in line.split("  ")[0])
        assert "bool" not in line


def test_version_and_help() -> None:
    for arguments in (["--version"], ["run", "--version"]):
        assert CliRunner().invoke(app, arguments).stdout == f"paged-sdk {paged_sdk.__version__}\n"
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    assert "--pa-memory-mb" in shown
    assert "--pa-gpu-mem" not in shown
    assert "run" in CliRunner().invoke(app, ["--help"]).stdout


def test_help_loads_no_engine() -> None:
    program = """
import sys
from paged_sdk.cli import main
sys.argv = ["paged-sdk", "run", "--help"]
try:
    main()
except SystemExit as end:
    assert end.code == 0
loaded = {"torch", "tokenizers", "jinja2", "paged_sdk.model"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody/model", "~nobody/" + "x" * 300])
@pytest.mark.parametrize("flags", [[], ["--format", "plain"]])
def test_names_that_no_file_has(command_line: CommandLine, name: str, flags: list[str]) -> None:
    """They are the builder's to refuse; to look for such a file is an error of its own on some systems."""
    result = CliRunner().invoke(app, ["run", "--model-id", name, *flags])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
