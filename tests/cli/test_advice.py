"""Errors on the command line name its options where the Python API would name a builder's method or a class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from paged_sdk import ContextLengthError, InvalidRequestError, MemoryGpuConfig, ModelLoadError, PagedCacheType
from paged_sdk.cli.advice import IS_ABOUT_PYTHON, SAID_OTHERWISE, in_options, told
from paged_sdk.cli.app import app
from paged_sdk.cli.groups import spellings_of_settings
from paged_sdk.cli.run import run
from paged_sdk.cli.top import top


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, one without a chat template, and one with recurrent layers."""
    folder = tmp_path_factory.mktemp("models")
    tiny.make_checkpoint("llama", folder / "llama")
    bare = tiny.make_checkpoint("llama", folder / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 16,
    }
    tiny.make_other_checkpoint("lfm2", folder / "lfm2", **layers)
    return folder


@pytest.mark.parametrize(
    ("command", "code", "named"),
    [
        (
            "run Hi -m llama --pa-context-len 999999999",
            1,
            r"of --pa-context-len 999999999 needs .* --pa-context-len \d+",
        ),
        (
            "run Hi -m llama --pa-memory-mb 99999999",
            1,
            r"of --pa-memory-mb 99999999 needs .* fits is --pa-memory-mb \d+",
        ),
        ("run Hi -m llama --pa-memory-fraction 1e-9", 1, "of --pa-memory-fraction 1e-09 needs"),
        ("run Hi -m llama --pa-memory-mb 99999999", 1, r"--pa-cache-type F8E4M3 has room for \d+ tokens"),
        ("run Hi -m bare", 1, "give one with --chat-template, or send plain text with --raw$"),
        ("run Hi -m lfm2 --max-seqs 999999999", 1, r"for \d+ sequences \(--max-seqs\)"),
        (
            "run Hi -m lfm2 --paged-attn off --prefix-cache-n 4",
            2,
            "Invalid value for --prefix-cache-n: 4 is not allowed",
        ),
        ("run Hi -m llama --pa-cache-type q4", 2, "Invalid value for --pa-cache-type: 'q4' is not allowed"),
        ("run Hi -m llama --prefix-cache-dir kv --prefix-cache-n 0", 2, "which --prefix-cache-n or its variable"),
        ("run Hi -m llama --format gguf", 1, "--format plain loads Hugging Face checkpoints"),
        ("bench llama -f gone.gguf", 2, "--format plain loads Hugging Face checkpoints"),
    ],
)
def test_options_are_named(
    command: str, code: int, named: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(models / each) if (models / each).exists() else each for each in command.split()]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == code, result.output
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert re.search(named, shown) is not None, shown
    assert IS_ABOUT_PYTHON.search(shown) is None, shown
    assert "MemoryGpuConfig" not in shown


def test_phrases_are_what_the_api_says_and_their_options_exist() -> None:
    spellings = spellings_of_settings(run)
    said = [
        repr(MemoryGpuConfig.ContextSize(64)),
        "ContextSize(64)",
        repr(MemoryGpuConfig.MB(64)),
        "MB(64)",
        repr(MemoryGpuConfig.Fraction(0.5)),
        str(PagedCacheType.F8E4M3),
        "TextModelBuilder loads",
        "send_completion_request",
    ]
    for phrase in SAID_OTHERWISE:
        assert spellings[phrase.option] == f"--{phrase.option.replace('_', '-')}"
        assert any(re.search(phrase.pattern, each) for each in said), phrase.pattern
    changed = [in_options(each, spellings) for each in said]
    assert changed == [
        *("--pa-context-len 64", "--pa-context-len 64", "--pa-memory-mb 64", "--pa-memory-mb 64"),
        *("--pa-memory-fraction 0.5", "--pa-cache-type F8E4M3", "--format plain loads", "--raw"),
    ]


def test_a_command_without_the_option_says_it_as_the_api_does() -> None:
    text = "a smaller with_max_num_seqs(4), ContextSize(64), or send_completion_request"
    assert in_options(text, spellings_of_settings(top)) == text
    assert in_options(text, spellings_of_settings(run)) == "a smaller --max-seqs, --pa-context-len 64, or --raw"


def test_what_says_both_says_the_option() -> None:
    assert in_options("by with_isq() (--isq)", {}) == "by --isq"
    assert (
        in_options("give that too, GgufModelBuilder(...).with_mmproj(...) (--mmproj)", {}) == "give that too, --mmproj"
    )


def test_advice_that_only_a_program_can_follow_is_left_out() -> None:
    spellings = spellings_of_settings(run)
    error = InvalidRequestError("it takes no images", advice="VisionModelBuilder builds one that does")
    assert told(error, spellings) == "it takes no images"
    error = InvalidRequestError("it takes no tools", advice="give one that does with with_chat_template")
    assert told(error, spellings) == "it takes no tools: give one that does with --chat-template"
    too_long = ContextLengthError("too long", advice="shorten it, or use RequestBuilder.with_truncation()")
    assert told(too_long, spellings) == "too long: shorten it"
    assert told(ModelLoadError("fewer, by with_max_num_seqs"), spellings) == "fewer, by --max-seqs"
