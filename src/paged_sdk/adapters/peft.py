"""Read a LoRA adapter as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from torch import Tensor

from paged_sdk.adapters.adapter import Adapter, ModuleUpdate
from paged_sdk.adapters.peft_config import PeftConfig
from paged_sdk.errors import AdapterError, ModelLoadError, shown
from paged_sdk.system.files import is_file, read_json
from paged_sdk.weights.safetensors.file import SafetensorsFile

__all__ = ["read_peft"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLE: Final = "adapter_model.bin"
_NAME: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?:lora_(?P<side>[AB])(?:\.default)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.default)?|(?P<magnitude>lora_magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_MAGNITUDE: Final = "magnitude"
# PEFT lists both for each class that classifies sequences, which has one of them.
_HEADS: Final = ("classifier", "score")
_COMMON: Final = re.compile(r"^base_model\.model\.")
# PEFT saves the unchanged output projection or embedding along with its update.
_COPY: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")


def read_peft(directory: Path) -> Adapter:
    """Read an adapter.

    :param directory: the directory of the two files
    :raises AdapterError: a file is missing, malformed or a pickle, or needs an unsupported feature
    """
    try:
        return _read(directory)
    except AdapterError:
        raise
    except ModelLoadError as error:
        raise AdapterError(str(error), path=error.path) from error


def _read(directory: Path) -> Adapter:
    if not is_file(directory / _CONFIG):
        raise AdapterError(f"{directory} holds no {_CONFIG}: it is no adapter of PEFT's", path=directory)
    config = PeftConfig.read(directory / _CONFIG, read_json(directory / _CONFIG))
    path = directory / _WEIGHTS
    if not is_file(path):
        if is_file(directory / _PICKLE):
            raise AdapterError(
                f"{directory / _PICKLE} is a pickle, which can run any code when it is loaded and is refused: have "
                f"PEFT save the adapter as {_WEIGHTS}",
                path=directory / _PICKLE,
            )
        raise AdapterError(f"{directory} holds no {_WEIGHTS}", path=directory)
    file = SafetensorsFile(path)
    try:
        modules = _modules(file, config)
        whole = _whole_modules(file, config)
        copies = {match["module"]: file.shape(name) for name in file.names() if (match := _COPY.fullmatch(name))}
    finally:
        file.close()
    return Adapter(
        path=str(directory),
        base=config.base,
        modules=modules,
        is_target=config.is_target if config.tells_targets else None,
        invocation=config.invocation,
        copies=copies,
        whole=whole,
        is_whole=config.is_whole,
    )


def _modules(file: SafetensorsFile, config: PeftConfig) -> dict[str, ModuleUpdate]:
    sides: dict[str, dict[str, str]] = {}
    for name in file.names():
        match = _NAME.fullmatch(name)
        if match is None and (_COPY.fullmatch(name) or config.is_whole(_module_of(name))):
            continue
        if match is None:
            what = "no update of a linear layer"
            raise AdapterError(f"{file.path}: tensor {shown(name)} is {what}", path=file.path, tensor=name)
        sides.setdefault(match["module"], {})[match["side"] or match["embedding"] or _MAGNITUDE] = name
    if not sides:
        raise AdapterError(f"{file.path} holds no tensors", path=file.path)
    modules = {module: _update(file, config, module, names) for module, names in sorted(sides.items())}
    if config.is_tied and any(update.looks_up or module.endswith("lm_head") for module, update in modules.items()):
        allowed = "false: an update of the embeddings is theirs alone, and so is the output projection's"
        raise AdapterError.of(config.path, "ensure_weight_tying", True, allowed)
    return modules


def _update(file: SafetensorsFile, config: PeftConfig, module: str, names: dict[str, str]) -> ModuleUpdate:
    looks_up = any("lora_embedding_" in name for name in names.values())
    ends = ("lora_embedding_A", "lora_embedding_B") if looks_up else ("lora_A.weight", "lora_B.weight")
    due = dict(zip("AB", ends, strict=True))
    if config.has_magnitudes:
        due[_MAGNITUDE] = "lora_magnitude_vector"
    for side, last in due.items():
        if side not in names or (looks_up and side in "AB" and "lora_embedding_" not in names[side]):
            missing = f"base_model.model.{module}.{last}"
            raise AdapterError(f"{file.path} lacks tensor {shown(missing)}", path=file.path, tensor=missing)
    if looks_up and config.has_magnitudes:
        what = f"tensor {shown(names['A'])} is of embeddings, whose update cannot be decomposed (DoRA)"
        raise AdapterError(f"{file.path}: {what}", path=file.path, tensor=names["A"])
    down, up = (_matrix(file, names[side]) for side in ("A", "B"))
    rank = config.rank_of(module)
    for name, found in ((names["A"], down.shape[0]), (names["B"], up.shape[1])):
        if found != rank:
            raise AdapterError(
                f"{file.path}: tensor {shown(name)} has rank {found}, {config.path.name} says {rank}",
                path=file.path,
                tensor=name,
                value=found,
            )
    return ModuleUpdate(
        names["A"],
        down,
        up,
        config.scale_of(module),
        magnitude=_magnitude(file, config, names.get(_MAGNITUDE), len(up)),
        looks_up=looks_up,
    )


def _magnitude(file: SafetensorsFile, config: PeftConfig, name: str | None, rows: int) -> Tensor | None:
    if name is None:
        return None
    if not config.has_magnitudes:
        what = f"tensor {shown(name)} is of an adapter with use_dora, which {config.path.name} does not set"
        raise AdapterError(f"{file.path}: {what}", path=file.path, tensor=name)
    shape, dtype = file.shape(name), file.dtype(name)
    if shape != (rows,) or not dtype.is_floating_point:
        raise AdapterError(
            f"{file.path}: tensor {shown(name)} is {dtype} {list(shape)}: expected {rows} numbers",
            path=file.path,
            tensor=name,
            value=shape,
        )
    return file.tensor(name)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _whole_modules(file: SafetensorsFile, config: PeftConfig) -> dict[str, Tensor]:
    """Return the tensors of modules that were trained as a whole, by their names in the base's checkpoint."""
    found = {}
    for name in file.names():
        if not config.is_whole(_module_of(name)):
            continue
        dtype = file.dtype(name)
        if not dtype.is_floating_point or _NAME.fullmatch(name):
            what = f"{dtype}: expected numbers of a module that was trained as a whole"
            raise AdapterError(f"{file.path}: tensor {shown(name)} is {what}", path=file.path, tensor=name)
        found[_COMMON.sub("", name)] = file.tensor(name)
    for module in config.whole:
        if module not in _HEADS and not any(f"{module}." in name for name in found):
            missing = f"base_model.model.{module}.weight"
            raise AdapterError(f"{file.path} lacks tensor {shown(missing)}", path=file.path, tensor=missing)
    return found


def _matrix(file: SafetensorsFile, name: str) -> Tensor:
    shape, dtype = file.shape(name), file.dtype(name)
    if len(shape) != 2 or not dtype.is_floating_point:
        raise AdapterError(
            f"{file.path}: tensor {shown(name)} is {dtype} {list(shape)}: expected a matrix of numbers",
            path=file.path,
            tensor=name,
            value=shape,
        )
    return file.tensor(name)
