"""What a checkpoint says of vectors: read, or an error that names the file; never anything untyped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.errors import CheckpointError
from paged_sdk.weights.checkpoint import Checkpoint
from paged_sdk.weights.embedding_recipe import read_recipe

MEAN = {"pooling_mode_mean_tokens": True}
KINDS = ("Transformer", "Pooling")
HIDDEN = 2


class NoSource:
    """Stands in for weights that nobody asks for."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the weights is not needed")


def read(directory: Path, *, metadata: dict[str, Any] | None = None) -> EmbeddingRecipe:
    source: Any = NoSource()
    return read_recipe(Checkpoint(path=directory, config={}, source=source, metadata=metadata), HIDDEN)


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [{"type": f"library.{kind}", "path": "" if kind == "Transformer" else kind} for kind in kinds]


def test_a_checkpoint_that_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) == EmbeddingRecipe()
    assert read(tmp_path, metadata={"general.architecture": "llama"}) == EmbeddingRecipe()
    assert read(tmp_path, metadata={"general.architecture": "llama", "llama.pooling_type": 0}) == EmbeddingRecipe()


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": "["},
        {"modules.json": {}},
        {"modules.json": [3]},
        {"modules.json": [{"type": "x.Transformer", "path": "../other"}]},
        {"modules.json": [{"type": "x.Transformer", "path": "/etc"}]},
        {"modules.json": [{"type": "x.Transformer", "path": 3}]},
        {"modules.json": modules("Pooling")},
        {"modules.json": modules(*KINDS, *["Normalize"] * 15), "Pooling/config.json": MEAN},
        {"modules.json": modules(*KINDS), "Pooling/config.json": "[]"},
        {
            "modules.json": modules(*KINDS),
            "Pooling/config.json": MEAN,
            "sentence_bert_config.json": {"max_seq_length": "9"},
        },
        {
            "modules.json": modules(*KINDS),
            "Pooling/config.json": MEAN,
            "config_sentence_transformers.json": {"prompts": {"query": 3}},
        },
        {
            "modules.json": modules(*KINDS),
            "Pooling/config.json": MEAN,
            "config_sentence_transformers.json": {"prompts": {"query": "Find: "}, "default_prompt_name": ["query"]},
        },
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_file(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, files)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "why_not"),
    [
        ({"pooling_mode": ["mean", "max"]}, "mean"),
        ({"pooling_mode": {"a": 1}}, "pools by"),
        ({"pooling_mode": "median"}, "median"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_mean_sqrt_len_tokens": True}, "sqrt_len"),
        ({}, "nothing"),
    ],
)
def test_poolings_that_are_not_computed_are_named(pooling: dict[str, Any], why_not: str, tmp_path: Path) -> None:
    write(tmp_path, {"modules.json": modules(*KINDS), "Pooling/config.json": pooling})
    recipe = read(tmp_path)
    assert recipe.pooling is None
    assert recipe.why_not is not None
    assert why_not in recipe.why_not


def test_one_pooling_in_a_list_is_one(tmp_path: Path) -> None:
    write(tmp_path, {"modules.json": modules(*KINDS), "Pooling/config.json": {"pooling_mode": ["lasttoken"]}})
    recipe = read(tmp_path)
    assert (recipe.pooling, recipe.normalize, recipe.why_not) == ("last", False, None)


@pytest.mark.parametrize(
    ("kinds", "kind"), [(("Transformer", "Dense", "Pooling"), "Dense"), ((*KINDS, "Pooling"), "Pooling")]
)
def test_modules_at_other_places_are_named(kinds: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    """A dense layer before the pooling computes on the vectors of tokens, and need not be linear."""
    write(tmp_path, {"modules.json": modules(*kinds), "Pooling/config.json": MEAN, "Dense/config.json": {}})
    assert f"a module '{kind}'" in (read(tmp_path).why_not or "")


@pytest.mark.parametrize(
    ("settings", "tensors", "why_not"),
    [
        ({"activation_function": "torch.nn.modules.activation.ReLU"}, {}, "ReLU"),
        ({"activation_function": "torch.nn.Tanh"}, None, "pickled"),
        ({"activation_function": "torch.nn.Tanh"}, {"linear.weight": (3,)}, None),
        ({"activation_function": "torch.nn.Tanh"}, {"linear.weight": (3, 2), "linear.bias": (2,)}, None),
        ({"activation_function": "torch.nn.Tanh"}, {"linear.bias": (2,)}, None),
        ({"activation_function": "torch.nn.Tanh"}, {"linear.weight": (3, HIDDEN + 1)}, None),
    ],
)
def test_dense_layers_that_cannot_be_used(
    settings: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None, why_not: str | None, tmp_path: Path
) -> None:
    files = {"modules.json": modules(*KINDS, "Dense"), "Pooling/config.json": MEAN, "Dense/config.json": settings}
    write(tmp_path, files)
    if tensors is not None:
        save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "Dense/model.safetensors")
    if why_not is None:
        with pytest.raises(CheckpointError, match="Dense"):
            read(tmp_path)
    else:
        assert why_not in (read(tmp_path).why_not or "")


@pytest.mark.parametrize("value", [-1, 5, 2.5, "mean", True, [1]])
def test_gguf_poolings_that_there_are_not(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: llama\.pooling_type"):
        read(tmp_path, metadata={"general.architecture": "llama", "llama.pooling_type": value})
