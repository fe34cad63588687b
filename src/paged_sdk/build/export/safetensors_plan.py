"""Write a directory of safetensors from a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from paged_sdk.build.progress import LoadingBar
from paged_sdk.chat.text_processor import TextProcessor, text_processor_from_gguf
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from paged_sdk.models.family import find_family
from paged_sdk.models.tensor_names import AssistantNames
from paged_sdk.system.files import is_file
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint
from paged_sdk.weights.hub import resolve_model
from paged_sdk.weights.new_target import must_be_new, new_directory
from paged_sdk.weights.quantized.format import as_decoded
from paged_sdk.weights.safetensors.writer import NewTensor, write_shards
from paged_sdk.weights.sentence_modules import read_modules
from paged_sdk.weights.source import WeightSource

__all__ = ["write"]

_CPU: Final = torch.device("cpu")
_DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ONLY_IN_GGUF: Final = ("inv_freq_divisors", "gguf_attn_factor")
# Files besides the weights, copied if they exist.
_COPIED: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# Files of sentence-transformers modules, in the modules' own directories.
_OF_MODULES: Final = ("config.json", "sentence_bert_config.json", "model.safetensors")
# Granite's experts, which a GGUF file has one by one, and what Granite's checkpoints have of all experts of a layer.
_EXPERT: Final = re.compile(r"(.+\.block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACKS: Final = MappingProxyType(
    {"gate_proj": "input_linear.weight", "up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
)


def write(source: str | Path, target: str | Path, type: str, *, show_progress: bool) -> Path:
    """Implement :func:`paged_sdk.build.export.safetensors.write_safetensors`."""
    target = Path(os.path.expanduser(target))
    must_be_new(target)
    if not isinstance(type, str) or type not in _DTYPES:
        raise ConfigError.of("type", type, f"one of {', '.join(_DTYPES)} for safetensors, which are not quantized")
    checkpoint = open_checkpoint(resolve_model(source))
    try:
        config = _config(checkpoint, type)
        tensors = _tensors(checkpoint.source, _DTYPES[type])
        size = sum(tensor.num_bytes for tensor in tensors)
        with (
            new_directory(target, size) as part,
            LoadingBar(f"Writing {target.name}", visible=show_progress) as bar,
        ):
            (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
            _write_tokenizer(checkpoint, part)
            write_shards(part, tensors, on_progress=bar.update)
    finally:
        checkpoint.source.close()
    return target


def _config(checkpoint: Checkpoint, type: str) -> dict[str, Any]:
    """Return the content of config.json.

    :raises UnsupportedArchitectureError: no family has this ``model_type``, or config.json cannot express a GGUF
        setting
    """
    family = find_family(checkpoint.config)
    scaling = checkpoint.config.get("rope_scaling") or {}
    for name in _ONLY_IN_GGUF:
        if name in scaling:
            raise UnsupportedArchitectureError(
                f"{checkpoint.path}: config.json has no field for rope_scaling.{name}, by which the GGUF file says how "
                "positions are scaled",
                architecture=checkpoint.model_type,
            )
    config = as_decoded(checkpoint.config)
    config.pop("torch_dtype", None)  # the older name of dtype
    config.setdefault("architectures", [family.architectures[0]])
    return config | {"dtype": str(_DTYPES[type]).removeprefix("torch.")}


def _tensors(source: WeightSource, dtype: torch.dtype) -> list[NewTensor]:
    """Return the tensors to write, by name: the source's, with Granite's experts stacked."""
    found, stacks = [], dict[str, dict[int, list[str]]]()
    for name in sorted(source.names()):
        match = _EXPERT.fullmatch(name)
        if match is None:
            found.append(_tensor(source, name, dtype))
        else:
            block, expert, projection = match.groups()
            stacks.setdefault(f"{block}.{_STACKS[projection]}", {}).setdefault(int(expert), []).append(name)
    found += [_stack(source, name, members, dtype) for name, members in stacks.items()]
    return sorted(found, key=lambda tensor: tensor.name)


def _stack(source: WeightSource, name: str, members: Mapping[int, Sequence[str]], dtype: torch.dtype) -> NewTensor:
    """Return the stack of matrices of all experts, which may each be divided by rows.

    :param members: the names of each expert's matrices, in the order of rows
    """
    experts = [members[expert] for expert in sorted(members)]
    shapes = [source.shape(each) for each in experts[0]]

    def make() -> Tensor:
        return torch.stack([torch.cat([_decoded(source, each, dtype) for each in parts]) for parts in experts])

    shape = (len(experts), sum(rows for rows, _ in shapes), shapes[0][1])
    return NewTensor(name=name, shape=shape, dtype=dtype, make=make)


def _tensor(source: WeightSource, name: str, dtype: torch.dtype) -> NewTensor:
    if name == AssistantNames().order:  # token ids, which bfloat16 would round
        dtype = torch.int64
    return NewTensor(name=name, shape=source.shape(name), dtype=dtype, make=partial(_decoded, source, name, dtype))


def _decoded(source: WeightSource, name: str, dtype: torch.dtype) -> Tensor:
    values = source.tensor(name, dtype, _CPU)
    if not values.isfinite().all():
        raise CheckpointError(f"tensor {name} has NaN or Inf as {str(dtype).removeprefix('torch.')}")
    return values


def _write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    if checkpoint.metadata is None:
        _copy(_COPIED, checkpoint.path, directory)
        for module in read_modules(checkpoint.path) or ():
            if module.directory != checkpoint.path:
                _copy(_OF_MODULES, module.directory, directory / module.directory.relative_to(checkpoint.path))
        return
    text = text_processor_from_gguf(checkpoint.metadata)
    try:
        _write_text_processor(text, directory)
    finally:
        text.close()


def _copy(names: Iterable[str], source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if is_file(source / name):
            shutil.copyfile(source / name, target / name)


def _write_text_processor(text: TextProcessor, directory: Path) -> None:
    names = dict(text.tokenizer.special.names)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    template = text.pair_template or text.template  # a model with a template for reranking does not chat
    if template is not None:
        settings["chat_template"] = template.source
    if text.model_max_length is not None:
        settings["model_max_length"] = text.model_max_length
    generation: dict[str, Any] = {"eos_token_id": sorted(text.stop_token_ids)} if text.stop_token_ids else {}
    if text.tokenizer.special.bos is not None:
        generation["bos_token_id"] = text.tokenizer.special.bos
    files = {"tokenizer_config.json": settings, "generation_config.json": generation}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    (directory / "tokenizer.json").write_text(text.tokenizer.to_json(), encoding="utf-8")
