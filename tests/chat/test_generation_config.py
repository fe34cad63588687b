from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged_sdk.chat.generation_config import read_generation_defaults
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.errors import CheckpointError


def write(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        ({}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
             "eos_token_id": [5, 7], "transformers_version": "5.0"},
            GenerationDefaults(
                temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1, eos_token_ids=(5, 7)
            ),
        ),
        ({"do_sample": False, "top_k": 0, "top_p": 1, "temperature": None}, GenerationDefaults(top_p=1.0)),
        ({"eos_token_id": 0, "temperature": 0}, GenerationDefaults(temperature=0.0, eos_token_ids=(0,))),
    ],
)  # fmt: skip
def test_values(tmp_path: Path, content: dict[str, Any], defaults: GenerationDefaults) -> None:
    write(tmp_path, "generation_config.json", content)
    assert read_generation_defaults(tmp_path) == defaults


def test_without_a_file() -> None:
    assert read_generation_defaults(Path("no", "such", "directory")) == GenerationDefaults()


def test_end_tokens_of_config_json_count_where_there_are_no_others(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 3})
    assert read_generation_defaults(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "generation_config.json", {"top_k": 5})
    assert read_generation_defaults(tmp_path).eos_token_ids == (3,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [4]})
    assert read_generation_defaults(tmp_path).eos_token_ids == (4,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1), ("temperature", "warm"), ("temperature", True), ("top_p", 0), ("top_p", 1.5),
        ("min_p", float("nan")), ("repetition_penalty", 0), ("top_k", -1), ("top_k", 2.5), ("top_k", True),
        ("eos_token_id", "</s>"), ("eos_token_id", [1, -2]), ("eos_token_id", True),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} = "):
        read_generation_defaults(tmp_path)
