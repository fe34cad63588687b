"""Read the file that says what ``paged-sdk serve`` is to serve, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

import typer
from attrs import field, frozen

from paged_sdk import InvalidRequestError, PagedCacheType, Topology
from paged_sdk.cli.options import ModelFormat, PagedAttnMode
from paged_sdk.wire.body import BodyReader, Bounds, read_json
from paged_sdk.wire.sampling import SamplingDefaults

__all__ = ["ServiceFile", "service_file_schema"]


class Layer(TypedDict, total=False):
    """Says what layers are to be."""

    isq: Annotated[str | None, "What their weights are quantized to."]
    device: Annotated[str | None, "Where they are to be."]


class Paged(TypedDict, total=False):
    """Says how the KV cache is kept; of the three sizes, one at most."""

    mode: Annotated[Literal["auto", "on", "off"], "Whether it is paged."]
    context_len: Annotated[int | None, Bounds(1), "Size of the KV pool in tokens."]
    memory_mb: Annotated[int | None, Bounds(1), "Size of the KV pool in MiB."]
    memory_fraction: Annotated[float | None, Bounds(0, 1), "Size of the KV pool as a share of the device's memory."]
    block_size: Annotated[int | None, Bounds(1), "Tokens per block."]
    cache_type: Annotated[Literal["auto", "f8e4m3"] | None, "What a KV element is stored as."]


class Server(TypedDict, total=False):
    """Says who may ask, and where."""

    host: Annotated[str, "The address to listen at. Others than this machine's need a key."]
    port: Annotated[int, Bounds(0, 65535), "0: any that is free."]
    api_keys: Annotated[list[str], "Answer those alone who send one. PAGED_SDK_API_KEY keeps it out of files."]
    cors_origins: Annotated[list[str], "Web pages from there may ask."]
    image_hosts: Annotated[list[str], "Fetch images from there, by address."]
    max_body_mb: Annotated[int, Bounds(1), "MiB that a request may have."]
    timeout: Annotated[float | None, Bounds(0), "Seconds that an answer may take."]
    drain_timeout: Annotated[float, Bounds(0), "Seconds that requests are given to finish when it ends."]
    adapter_folder: Annotated[str | None, "Clients may load adapters from there."]
    page: Annotated[bool, "Whether there is a chat page at /."]


# "$schema" is what editors look for.
Service = TypedDict(
    "Service",
    {
        "$schema": Annotated[str, "Where an editor finds this schema."],
        "model": Annotated[str | None, "A directory, a GGUF file or a hub id; null: the embedded SmolLM2-135M."],
        "name": Annotated[str | None, "What clients call the model."],
        "format": Annotated[Literal["plain", "gguf"] | None, "What the model is stored as, if it is not plain to see."],
        "arch": Annotated[str | None, "The family that the model has to be of."],
        "quantized_files": Annotated[list[str], "GGUF files within the directory or repository."],
        "mmproj": Annotated[str | None, "The image encoder of a GGUF model."],
        "tokenizer": Annotated[str | None, "A directory with a tokenizer.json, or that file."],
        "chat_template": Annotated[str | None, "A Jinja chat template, or its path."],
        "vision": Annotated[bool, "Take images: the checkpoint has an image encoder."],
        "device": Annotated[str | None, "auto, cpu, cuda, cuda:1, mps ..."],
        "dtype": Annotated[str | None, "auto, bfloat16, float16, float32 ..."],
        "isq": Annotated[str | None, "Quantize while loading: 4, 8, Q4K, Q8_0 ..."],
        "isq_cache": Annotated[str | None, "Keep weights that are quantized while loading there."],
        "imatrix": Annotated[str | None, "An importance matrix of llama.cpp's."],
        "calibration_file": Annotated[str | None, "A text to run through the model first."],
        "topology": Annotated[str | dict[str, Layer] | None, "What single layers are: a YAML file, or its content."],
        "num_threads": Annotated[int | None, Bounds(1), "CPU threads of one operation."],
        "paged": Annotated[Paged, "The KV cache."],
        "prefix_cache_n": Annotated[int | None, Bounds(0), "0: no prefix cache."],
        "max_seqs": Annotated[int | None, Bounds(1), "Sequences that are computed at once."],
        "max_num_batched_tokens": Annotated[int | None, Bounds(1), "Tokens in one step."],
        "max_seq_len": Annotated[int | None, Bounds(1), "Tokens in a sequence."],
        "max_queue": Annotated[int | None, Bounds(1), "Requests that may wait; more are refused."],
        "speculate": Annotated[int | None, Bounds(1), "Guess up to so many tokens ahead."],
        "draft_model": Annotated[str | None, "A smaller model that guesses tokens."],
        "adapters": Annotated[dict[str, str], "LoRA adapters by name, which clients call as models."],
        "sampling": Annotated[SamplingDefaults, "What requests get that leave it open; else the checkpoint's."],
        "server": Annotated[Server, "Who may ask, and where."],
    },
    total=False,
)

READER: Final = BodyReader(Service)

# The names of ``serve``'s parameters, where they are not those of the file.
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
READ_AS: Final[Mapping[str, Callable[[Any], object]]] = {
    "format": ModelFormat,
    "tokenizer": Path,
    "mmproj": Path,
    "imatrix": Path,
    "calibration_file": Path,
    "isq_cache": Path,
    "topology": Path,
    "adapters": lambda value: [f"{name}={path}" for name, path in value.items()],
    "paged.mode": PagedAttnMode,
    "paged.cache_type": PagedCacheType,
    "quantized_files": tuple,
    "server.adapter_folder": Path,
    "server.api_keys": tuple,
    "server.cors_origins": tuple,
    "server.image_hosts": tuple,
    "server.page": lambda value: not value,
}


@frozen(kw_only=True)
class ServiceFile:
    """Holds what a file says, as the options of the command line say it.

    :ivar options: values of ``serve``'s parameters, of those that the file has
    :ivar topology: one that the file holds itself
    :ivar sampling: what requests get that leave it open
    """

    options: Mapping[str, Any] = field(factory=dict, hash=False)
    topology: Topology | None = None
    sampling: Mapping[str, object] = field(factory=dict, hash=False)

    @classmethod
    def read(cls, path: Path) -> ServiceFile:
        """Read a file.

        :raises typer.BadParameter: it cannot be read, or says what there is not, which is named
        :raises ConfigError: a value that cannot be used
        """
        try:
            said = READER.read(read_json(path.read_bytes()))
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--config") from None
        except InvalidRequestError as error:
            raise typer.BadParameter(f"{path}: {error}", param_hint="--config") from None
        found: dict[str, Any] = {name: value for name, value in said.items() if name != "$schema"}
        sampling = found.pop("sampling", {})
        for section in ("paged", "server"):
            for name, value in found.pop(section, {}).items():
                found[f"{section}.{name}"] = value
        held = found.pop("topology") if isinstance(found.get("topology"), Mapping) else None
        options = {
            RENAMED.get(name, name.rpartition(".")[2]): READ_AS.get(name, _as_it_is)(value)
            for name, value in found.items()
            if value is not None
        }
        return cls(
            options=options,
            topology=None if held is None else Topology.from_dict(held),
            sampling={name: value for name, value in sampling.items() if value is not None},
        )


def _as_it_is(value: object) -> object:
    return value


def service_file_schema() -> dict[str, Any]:
    """Return the JSON schema of such files."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What paged-sdk serve --config reads",
        **READER.schema(),
    }
