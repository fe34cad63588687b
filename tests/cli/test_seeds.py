"""Command lines that users of mistral.rs have, with the program's name changed, mean what they meant there."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from paged_sdk import (
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    TextModelBuilder,
)
from paged_sdk.cli import talk
from paged_sdk.cli.app import app
from paged_sdk.cli.loading import AnyBuilder
from paged_sdk.cli.text_options import PromptOptions
from paged_sdk.config.env import Environment, read_environment

PHI = TextModelBuilder("microsoft/Phi-3-mini-128k-instruct")
PHI_35 = TextModelBuilder("microsoft/Phi-3.5-mini-instruct")
MISTRAL = GgufModelBuilder(
    "TheBloke/Mistral-7B-Instruct-v0.1-GGUF", ["mistral-7b-instruct-v0.1.Q4_K_M.gguf"]
).with_tok_model_id("mistralai/Mistral-7B-Instruct-v0.1")
MB, FRACTION = MemoryGpuConfig.MB, MemoryGpuConfig.Fraction

LINES: dict[str, AnyBuilder] = {
    "-i --pa-gpu-mem 8192 --pa-blk-size 32 --isq Q4K plain -m microsoft/Phi-3-mini-128k-instruct -a phi3": (
        PHI.with_isq(IsqType.Q4K).with_paged_attn(PagedAttentionMeta(block_size=32, gpu_memory=MB(8192)))
    ),
    "-i --pa-gpu-mem-usage .95 --pa-blk-size 32 gguf -t mistralai/Mistral-7B-Instruct-v0.1 "
    "-m TheBloke/Mistral-7B-Instruct-v0.1-GGUF -f mistral-7b-instruct-v0.1.Q4_K_M.gguf": (
        MISTRAL.with_paged_attn(PagedAttentionMeta(block_size=32, gpu_memory=FRACTION(0.95)))
    ),
    "run --pa-memory-mb 8192 --pa-block-size 32 --isq 4 -m microsoft/Phi-3-mini-128k-instruct": (
        PHI.with_isq(IsqType.Q4K).with_paged_attn(PagedAttentionMeta(block_size=32, gpu_memory=MB(8192)))
    ),
    "run --pa-memory-fraction 0.95 --pa-block-size 32 --format gguf -t mistralai/Mistral-7B-Instruct-v0.1 "
    "-m TheBloke/Mistral-7B-Instruct-v0.1-GGUF -f mistral-7b-instruct-v0.1.Q4_K_M.gguf": (
        MISTRAL.with_paged_attn(PagedAttentionMeta(block_size=32, gpu_memory=FRACTION(0.95)))
    ),
    "run --paged-attn on --pa-memory-mb 4096 --pa-block-size 32 --pa-cache-type f8e4m3 "
    "-m microsoft/Phi-3-mini-128k-instruct": (
        PHI.with_paged_attn(PagedAttentionMeta(block_size=32, gpu_memory=MB(4096), cache_type=PagedCacheType.F8E4M3))
    ),
    'run --model "microsoft/Phi-3.5-mini-instruct" "Hello, world!"': PHI_35,
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_means_what_it_meant(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[AnyBuilder, PromptOptions]] = []
    monkeypatch.setattr(talk, "talk", lambda builder, flags, *_, **named: seen.append((builder, flags)))
    words = shlex.split(line)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    ((builder, flags),) = seen
    assert builder == LINES[line]
    assert flags.interactive is ("-i" in words)
    assert flags.prompt == ("Hello, world!" if "Hello, world!" in words else None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MISTRALRS_PAGED_ATTN", "false", {"paged_attn": False}),
        ("MISTRALRS_PREFIX_CACHE_N", "0", {"prefix_cache_n": 0}),
        ("MISTRALRS_PAGED_ATTN_BLOCK_SIZE", "64", {"paged_meta": PagedAttentionMeta(block_size=64)}),
    ],
)
def test_a_variable_in_front_means_what_it_meant(name: str, value: str, expected: dict[str, Any]) -> None:
    assert read_environment({name: value}) == Environment(**expected)
