"""Read how a checkpoint embeds texts (pooling, dense layers, normalization, prompts), from sentence-transformers' files
or GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve

from paged_sdk.config.checks import plain
from paged_sdk.config.embedding import DenseLayer, EmbeddingRecipe
from paged_sdk.config.pooling import Pooling
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import is_file, read_json, read_json_if_there
from paged_sdk.weights.checkpoint import Checkpoint
from paged_sdk.weights.safetensors.source import SafetensorsSource
from paged_sdk.weights.sentence_modules import SentenceModule, read_modules, read_prompts

__all__ = ["read_recipe"]

_MODES: Final[Mapping[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: Final[Mapping[str, Pooling]] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_GGUF: Final[Mapping[int, Pooling | None]] = {0: None, 1: "mean", 2: "cls", 3: "last"}
_RANK: Final = 4
_DENSE: Final[Mapping[str, tuple[str, ...]]] = {"gemma-embedding": ("dense_2.weight", "dense_3.weight")}
_ACTIVATIONS: Final = {"Identity": False, "Tanh": True}


def read_recipe(checkpoint: Checkpoint, hidden_size: int) -> EmbeddingRecipe:
    """Read how the checkpoint embeds texts. An unsupported setting is no error, since the model may still generate
    text: the recipe's ``why_not`` names it.

    :param hidden_size: the size of the model's hidden states
    :raises CheckpointError: a file cannot be read, or has invalid values
    """
    if checkpoint.metadata is not None:
        return _of_gguf(checkpoint, checkpoint.metadata, hidden_size)
    modules = read_modules(checkpoint.path)
    return EmbeddingRecipe() if modules is None else _of_modules(checkpoint.path, modules, hidden_size)


def _of_gguf(checkpoint: Checkpoint, metadata: Mapping[str, Any], hidden_size: int) -> EmbeddingRecipe:
    path, source = checkpoint.path, checkpoint.source
    architecture = metadata.get("general.architecture")
    key = f"{architecture}.pooling_type"
    value = plain(metadata.get(key))
    if value is None:
        return EmbeddingRecipe()
    if type(value) is int and value == _RANK:
        return EmbeddingRecipe(why_not=f"{key} = {value}: this model ranks texts, and makes no vectors of them")
    if type(value) is not int or value not in _GGUF:
        raise CheckpointError(
            f"{path}: {key} = {shown(value)} is not allowed: expected an int from 0 to {_RANK}", path=path
        )
    recipe = EmbeddingRecipe(pooling=_GGUF[value])
    for name in _DENSE.get(str(architecture), ()):
        if name in source:
            weight = source.tensor(name, torch.float32, torch.device("cpu")).numpy()
            recipe = _with_layer(recipe, DenseLayer(weight), hidden_size, path, name)
    return recipe


def _with_layer(recipe: EmbeddingRecipe, layer: DenseLayer, hidden_size: int, path: Path, name: str) -> EmbeddingRecipe:
    """Add a dense layer, after checking that it accepts the vectors of the one before it, or else hidden states.

    :param path: where the layer's weight is stored, under ``name``, for errors
    :raises CheckpointError: it takes vectors of another size
    """
    width, shape = recipe.dense[-1].weight.shape[0] if recipe.dense else hidden_size, layer.weight.shape
    if len(shape) != 2 or shape[1] != width:
        raise CheckpointError(f"{path}: {name} has shape {list(shape)}: expected rows of {width}", path=path)
    return evolve(recipe, dense=(*recipe.dense, layer))


def _of_modules(directory: Path, modules: list[SentenceModule], hidden_size: int) -> EmbeddingRecipe:
    """Read a directory as sentence-transformers does: its modules, in order, and its prompts."""
    path = directory / "modules.json"
    recipe = EmbeddingRecipe(normalize=False)
    for place, module in enumerate(modules):
        kind, own = module.kind, module.directory
        if recipe.normalize and kind != "Normalize":
            return evolve(recipe, why_not=f"{path}: {kind} after Normalize is not computed here")
        match kind:
            case "Transformer" if place == 0:
                settings = read_json_if_there(own / "sentence_bert_config.json")
                most, lower = settings.get("max_seq_length"), settings.get("do_lower_case", False)
                if most is not None and (type(most) is not int or most < 1):
                    raise CheckpointError(f"{own}: max_seq_length = {shown(most)}: expected an int >= 1", path=own)
                recipe = evolve(recipe, max_tokens=most, lower_case=bool(lower))
                modalities = settings.get("modality_config")
                if isinstance(modalities, dict) and "message" in modalities:
                    why_not = f"{own}: texts go through the chat template (modality_config), which is not done here"
                    recipe = evolve(recipe, why_not=why_not)
            case "Pooling" if recipe.pooling is None:
                recipe = _pooled(recipe, own / "config.json")
            case "Dense" if recipe.pooling is not None:
                recipe = _with_dense(recipe, own, hidden_size)
            case "Normalize":
                recipe = evolve(recipe, normalize=True)
            case _:
                recipe = evolve(recipe, why_not=f"{path}: a module {shown(kind)} at place {place} is not computed here")
        if recipe.why_not is not None:
            return recipe
    if recipe.pooling is None:
        return evolve(recipe, why_not=f"{path} has no Pooling")
    prompts, default = read_prompts(directory)
    return evolve(recipe, prompts=prompts, default_prompt=default)


def _pooled(recipe: EmbeddingRecipe, path: Path) -> EmbeddingRecipe:
    settings = read_json(path)
    named = settings.get("pooling_mode")
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    modes = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    found = [_NAMES.get(str(named))] if named is not None else [_MODES.get(mode) for mode in modes]
    if len(found) != 1 or found[0] is None:
        asked = shown(named) if named is not None else ", ".join(modes) or "nothing"
        return evolve(recipe, why_not=f"{path} pools by {asked}, which is not computed here")
    return evolve(recipe, pooling=found[0], pools_prompt=settings.get("include_prompt", True) is not False)


def _with_dense(recipe: EmbeddingRecipe, directory: Path, hidden_size: int) -> EmbeddingRecipe:
    settings = read_json(directory / "config.json")
    activation = str(settings.get("activation_function", "")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        return evolve(recipe, why_not=f"{directory}: activation_function {shown(activation)} is not computed here")
    if not is_file(directory / "model.safetensors"):
        return evolve(recipe, why_not=f"{directory} has no model.safetensors, and pickled weights are refused")
    source = SafetensorsSource(directory)
    try:
        cpu = torch.device("cpu")
        weight = source.tensor("linear.weight", torch.float32, cpu).numpy()
        bias = source.tensor("linear.bias", torch.float32, cpu).numpy() if "linear.bias" in source else None
    finally:
        source.close()
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"{directory}: linear.bias has shape {list(bias.shape)}: expected {list(weight.shape[:1])}", path=directory
        )
    layer = DenseLayer(weight, bias, _ACTIVATIONS[activation])
    return _with_layer(recipe, layer, hidden_size, directory, "linear.weight")
