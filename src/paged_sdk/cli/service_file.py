"""Reads the configuration file of ``paged-sdk serve --config``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypedDict

import typer
from attrs import evolve, field, frozen

from paged_sdk import ConfigError, InvalidRequestError, PagedCacheType, Topology
from paged_sdk.cli.flags import exclusive, is_path_of, without_setting
from paged_sdk.cli.options import ModelFormat, PagedAttnMode
from paged_sdk.cli.server_options import folder
from paged_sdk.cli.unique_keys import unique
from paged_sdk.wire.body import BodyReader, Bounds, read_json
from paged_sdk.wire.sampling import SamplingDefaults

__all__ = ["ModelEntry", "ServiceFile", "is_service_file", "service_file_schema", "write_service_file"]


class Layer(TypedDict, total=False):
    """Holds the settings of layers."""

    isq: Annotated[str | None, "Their quantization type."]
    device: Annotated[str | None, "Their device."]


class Paged(TypedDict, total=False):
    """Holds the settings of the KV cache; at most one of the three sizes may be given."""

    mode: Annotated[Literal["auto", "on", "off"], "Whether it is paged."]
    context_len: Annotated[int | None, Bounds(1), "Size of the KV pool in tokens."]
    memory_mb: Annotated[int | None, Bounds(1), "Size of the KV pool in MiB."]
    memory_fraction: Annotated[float | None, Bounds(0, 1), "Size of the KV pool as a fraction of the device's memory."]
    block_size: Annotated[int | None, Bounds(1), "Tokens per block."]
    cache_type: Annotated[Literal["auto", "f8e4m3", "q4"] | None, "Type of KV elements."]


class Server(TypedDict, total=False):
    """Holds the settings of the HTTP server."""

    host: Annotated[str, "The address to listen on. Addresses that other machines reach need a key."]
    port: Annotated[int, Bounds(0, 65535), "The port; 0: any free one."]
    api_keys: Annotated[list[str], "Require one of these keys. PAGED_SDK_API_KEY keeps a key out of files."]
    cors_origins: Annotated[list[str], "Allow web pages of these origins."]
    image_hosts: Annotated[list[str], "Allow image URLs on these hosts."]
    max_body_mb: Annotated[int, Bounds(1), "Maximum size of a request in MiB."]
    timeout: Annotated[float | None, Bounds(0), "Maximum seconds per answer."]
    drain_timeout: Annotated[float, Bounds(0), "Seconds for running requests to finish on shutdown."]
    adapter_folder: Annotated[str | None, "Let clients load adapters from this directory."]
    page: Annotated[bool, "Whether there is a chat page at /."]
    log_json: Annotated[bool, "Log as JSON, with a line for every request."]


class ModelFile(TypedDict, total=False):
    """Holds the settings of a model."""

    model: Annotated[str | None, "A directory, a GGUF file or a Hub id; null: the embedded SmolLM2-135M."]
    name: Annotated[str | None, "The model's name for clients."]
    format: Annotated[Literal["plain", "gguf"] | None, "The model's file format, if it cannot be detected."]
    arch: Annotated[str | None, "The model family, to be checked."]
    quantized_files: Annotated[list[str], "GGUF files within the directory or repository."]
    hf_revision: Annotated[str | None, "Branch, tag or commit of the Hub repository."]
    token_source: Annotated[str | None, "Where to find the Hub token: cache, none, env:NAME or path:FILE."]
    mmproj: Annotated[str | None, "The image encoder of a GGUF model."]
    tokenizer: Annotated[str | None, "Another tokenizer: a directory or Hub id with a tokenizer.json, or that file."]
    chat_template: Annotated[str | None, "Another Jinja chat template, or its path."]
    ranking_tokens: Annotated[
        list[str],
        Bounds(1, 2),
        "Rerank by the model's answer: one token for relevant documents, and one for others.",
    ]
    vision: Annotated[bool, "Accept images; for checkpoints with an image encoder."]
    device: Annotated[str | None, "auto, cpu, cuda, cuda:1, mps ..."]
    dtype: Annotated[str | None, "auto, bfloat16, float16, float32 ..."]
    isq: Annotated[str | None, "Quantize while loading: 4, 8, Q4K, Q8_0 ..."]
    isq_cache: Annotated[str | None, "A directory to cache quantized weights in."]
    imatrix: Annotated[str | None, "A llama.cpp importance matrix."]
    calibration_file: Annotated[str | None, "A text file to compute an importance matrix from."]
    topology: Annotated[str | dict[str, Layer] | None, "Settings of single layers: a YAML file, or its content."]
    num_threads: Annotated[int | None, Bounds(1), "CPU threads per step."]
    tensor_parallel: Annotated[
        int | Literal["auto"] | None,
        Bounds(1),
        "Processes that share the model; auto: one per GPU or NUMA node.",
    ]
    paged: Annotated[Paged, "The KV cache."]
    prefix_cache_n: Annotated[int | None, Bounds(0), "0: no prefix cache."]
    prefix_cache_dir: Annotated[str | None, "A directory that keeps the prefix cache, also for later processes."]
    prefix_cache_dir_mb: Annotated[int | None, Bounds(1), "Maximum size of that directory in MiB."]
    max_seqs: Annotated[int | None, Bounds(1), "Sequences computed at once."]
    max_num_batched_tokens: Annotated[int | None, Bounds(1), "Tokens per step."]
    max_seq_len: Annotated[int | None, Bounds(1), "Tokens per sequence."]
    max_queue: Annotated[int | None, Bounds(1), "Requests that may wait; further ones are refused."]
    replicas: Annotated[int, Bounds(1), "Number of processes, each with the whole model."]
    ray: Annotated[bool, "Run the replicas under Ray Serve."]
    max_replicas: Annotated[int | None, Bounds(1), "Under Ray Serve: scale up to this many replicas with the load."]
    max_slowdown: Annotated[float | None, "How many times slower decoding may get while a prompt is prefilled."]
    batch_invariance: Annotated[bool, "Make results independent of the batch."]
    throughput_logging: Annotated[bool, "Show speed and KV pool usage every few seconds of work."]
    speculate: Annotated[int | None, Bounds(1), "Maximum number of draft tokens."]
    mtp: Annotated[bool, "Draft with the model's own layer for multi-token prediction."]
    draft_model: Annotated[str | None, "A draft model."]
    adapters: Annotated[dict[str, str], "LoRA adapters by name, which clients select as models."]


# "$schema", which editors look for, is not a Python identifier.
_Schema = TypedDict("_Schema", {"$schema": Annotated[str, "The path of this schema, for editors."]}, total=False)


class Service(_Schema, ModelFile, total=False):
    """Describes a whole file."""

    command: Annotated[Literal["serve"], "Makes it a file for from-config too."]
    models: Annotated[
        list[ModelFile], Bounds(1), "Several models instead of one. Settings next to this are their defaults."
    ]
    sampling: Annotated[SamplingDefaults, "Defaults for requests; otherwise the checkpoint's."]
    server: Annotated[Server, "Settings of the server."]


READER: Final = BodyReader(Service)

# Keys of the file whose parameter of ``serve`` has another name.
RENAMED: Final[Mapping[str, str]] = {
    "model": "model_id",
    "name": "served_model_name",
    "quantized_files": "quantized_file",
    "tokenizer": "tok_model_id",
    "adapters": "adapter",
    "paged.mode": "paged_attn",
    "paged.context_len": "pa_context_len",
    "paged.memory_mb": "pa_memory_mb",
    "paged.memory_fraction": "pa_memory_fraction",
    "paged.block_size": "pa_block_size",
    "paged.cache_type": "pa_cache_type",
    "server.api_keys": "api_key",
    "server.cors_origins": "cors_origin",
    "server.image_hosts": "image_host",
    "server.page": "no_page",
}
ARE_PATHS: Final = ("imatrix", "calibration_file", "isq_cache", "prefix_cache_dir", "topology")
MAY_BE_PATHS: Final = ("model_id", "mmproj", "tok_model_id", "chat_template")
OF_ONE: Final = (
    "model",
    "name",
    "quantized_files",
    "tokenizer",
    "arch",
    "draft_model",
    "adapters",
    "mmproj",
    "ranking_tokens",
)
"""Keys that cannot apply to several models."""
READ_AS: Final[Mapping[str, Callable[[Any], object]]] = {
    "format": ModelFormat,
    "adapters": lambda value: [f"{name}={path}" for name, path in value.items()],
    "paged.mode": PagedAttnMode,
    "paged.cache_type": PagedCacheType,
    "quantized_files": tuple,
    "name": lambda value: (value,),
    "server.adapter_folder": folder,
    "server.api_keys": tuple,
    "server.cors_origins": tuple,
    "server.image_hosts": tuple,
    "server.page": lambda value: not value,
}


@frozen(kw_only=True)
class ModelEntry:
    """Holds a file's settings of one model, as options of the command line.

    :ivar options: values by names of ``serve``'s parameters; only those that the file sets
    :ivar topology: a topology written in the file itself
    :ivar keys: where the file says each of them, by names of ``serve``'s parameters
    """

    options: Mapping[str, Any] = field(factory=dict, hash=False)
    topology: Topology | None = None
    keys: Mapping[str, str] = field(factory=dict, hash=False)

    @classmethod
    def of(cls, said: Mapping[str, Any], *, at: Mapping[str, str]) -> Self:
        """Convert an object of the file.

        :param at: where the file says it, by key; a key that is not here is where it says so itself
        :raises ValueError: a value that is none, named by its key
        """
        found = dict(said)
        places = {name: at.get(name, name) for name in found}
        for section in ("paged", "server"):
            for name, value in found.pop(section, {}).items():
                found[f"{section}.{name}"] = value
                places[f"{section}.{name}"] = f"{places[section]}.{name}"
        options: dict[str, Any] = {}
        keys: dict[str, str] = {}
        topology = None
        for name, value in found.items():
            if value is None:
                continue
            option, key = RENAMED.get(name, name.rpartition(".")[2]), places[name]
            keys[option] = key
            try:
                if name == "topology" and isinstance(value, Mapping):
                    topology = Topology.from_dict(value)
                else:
                    options[option] = READ_AS.get(name, _as_it_is)(value)
            except ConfigError as error:
                raise ValueError(f"{key}: {without_setting(error)}") from None
            except typer.BadParameter as error:
                raise ValueError(f"{key}: {error.message}") from None
        return cls(options=options, topology=topology, keys=keys)


@frozen(kw_only=True)
class ServiceFile:
    """Holds the content of a file.

    :ivar path: the file; None: there is none
    :ivar models: settings of each model, each with the server's settings too
    :ivar sampling: defaults of requests' sampling fields
    """

    path: Path | None = None
    models: tuple[ModelEntry, ...] = (ModelEntry(),)
    sampling: Mapping[str, object] = field(factory=dict, hash=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        :raises typer.BadParameter: the file cannot be read, or has an unknown key or an invalid value, which is named
        """
        try:
            data = path.read_bytes()
            read_json(data)
            said = READER.read(json.loads(data, object_pairs_hook=unique, parse_float=_number))
            return cls._of(path, {name: value for name, value in said.items() if name not in ("$schema", "command")})
        except OSError as error:
            raise _refused(path, error.strerror) from None
        except (InvalidRequestError, ValueError) as error:
            raise _refused(path, error) from None

    @classmethod
    def _of(cls, path: Path, shared: dict[str, Any]) -> Self:
        """Convert a file's content.

        :raises ValueError: a value that is none, named by its key
        """
        sampling = shared.pop("sampling", {})
        models = shared.pop("models", None)
        for name in OF_ONE:
            if models is not None and name in shared:
                raise ValueError(f"models: they cannot share {name}: give each model its own")
        entries = [ModelEntry.of(shared, at={})]
        if models is not None:
            entries = [
                ModelEntry.of({**shared, **each}, at={name: f"models[{place}].{name}" for name in each})
                for place, each in enumerate(models)
            ]
        return cls(
            path=path,
            models=tuple(entries),
            sampling={name: value for name, value in sampling.items() if value is not None},
        )

    def without(self, names: Collection[str]) -> Self:
        """Return the content without some options, which the command line overrides."""
        return evolve(
            self,
            models=tuple(
                ModelEntry(
                    options={name: value for name, value in each.options.items() if name not in names},
                    topology=None if "topology" in names else each.topology,
                    keys={name: key for name, key in each.keys.items() if name not in names},
                )
                for each in self.models
            ),
        )

    def of_models(self, model_ids: Sequence[str]) -> Sequence[ModelEntry]:
        """Return the settings of each model.

        :param model_ids: models that replace the file's; empty: the file's models
        :raises typer.BadParameter: the file has several models, and ``model_ids`` is not empty
        """
        if not model_ids:
            return self.models
        exclusive({"--model-id": True, "several models in --config": len(self.models) > 1})
        (shared,) = self.models
        return [evolve(shared, options={**shared.options, "model_id": each}) for each in model_ids]

    @property
    def values(self) -> Mapping[str, Sequence[object]]:
        """Return all values of each option, by name."""
        found: dict[str, list[object]] = {}
        for entry in self.models:
            for name, value in entry.options.items():
                found.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
        return found

    def key_of(self, name: str, value: object) -> str | None:
        """Return where the file sets an option; None if it does not. Where several models set it, the one of this value
        is meant.

        :param name: the option's name
        :param value: its value; None: unknown
        """
        having = [entry for entry in self.models if name in entry.keys]
        meant = [entry for entry in having if _is_value(name, entry.options.get(name), value)]
        keys = list(dict.fromkeys(entry.keys[name] for entry in meant[:1] or having))
        return " or ".join(keys) or None

    def refused(self, why: str) -> typer.BadParameter:
        """Return the error of something that the file says."""
        assert self.path is not None, "no file says anything"
        return _refused(self.path, why)


def _refused(path: Path, why: object) -> typer.BadParameter:
    return typer.BadParameter(f"{path}: {why}", param_hint="--config")


def _is_value(name: str, held: object, value: object) -> bool:
    """Tell whether this is an option's value, or the path that it names."""
    return str(held) == str(value) or (isinstance(value, Path) and is_path_of(name, held, value))


def _number(text: str) -> float:
    """Return a number; in JSON Schema, 1.0 is an integer."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _as_it_is(value: object) -> object:
    return value


def is_service_file(keys: Collection[str]) -> bool:
    """Tell whether all keys are keys of such a file."""
    return set(keys) <= set(READER.names)


def write_service_file(path: Path, options: Mapping[str, Any]) -> None:
    """Write options of ``serve`` as a file, which ``from-config`` accepts too. Paths are made absolute.

    :param options: values by names of ``serve``'s parameters
    :raises typer.BadParameter: the file cannot be written
    """
    names = {option: name for name, option in RENAMED.items()}
    content: dict[str, Any] = {"command": "serve"}
    for option, value in options.items():
        if option == "cpu":
            content["device"] = "cpu"
            continue
        section, _, name = names.get(option, option).rpartition(".")
        (content.setdefault(section, {}) if section else content)[name] = _written(option, value)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{json.dumps(content, indent=2)}\n")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--emit-config") from None


def _written(option: str, value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if option in ARE_PATHS or (option in MAY_BE_PATHS and os.path.exists(os.path.expanduser(str(value)))):
        return os.path.abspath(os.path.expanduser(str(value)))
    return list(value) if isinstance(value, tuple) else value


def service_file_schema() -> dict[str, Any]:
    """Return the JSON schema of such files."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What paged-sdk serve --config reads",
        **READER.schema(),
    }
