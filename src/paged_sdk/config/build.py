"""Hold the settings that a builder collects for its model."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen

from paged_sdk.config.checks import (
    IntAtLeast,
    IsA,
    IsText,
    as_int,
    as_optional_float,
    as_optional_int,
    is_bool,
    is_optional_bool,
    is_optional_slowdown,
    is_unicode,
    name_of,
    path_text,
    plain,
)
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedAttentionMeta
from paged_sdk.config.prefix_cache_dir import PrefixCacheDir
from paged_sdk.config.topology import Topology
from paged_sdk.errors import ConfigError

__all__ = ["AdapterSource", "BuildSettings", "DraftSource", "ModelSource", "is_encoder_name"]

DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "f16": "float16",
    "float32": "float32",
    "f32": "float32",
    "float64": "float64",
    "f64": "float64",
}
MAX_SOURCE = 4096
"""Maximum length of a token source: the longest path of Linux; tokens are shorter."""
MAX_THREADS = 1024
"""A larger number must be a typo, and would start all of these threads at once."""
MAX_RANKS = 1024
"""A larger number must be a typo: no model has as many heads."""
TOKEN_SOURCES = ("cache", "none", "literal:", "env:", "path:")


def _dtype(value: str) -> str:
    name = DTYPES.get(value.lower()) if isinstance(value, str) else None
    if name is None:
        raise ConfigError.of("dtype", value, "one of " + ", ".join(DTYPES))
    return name


def _is_token_source(instance: object, attribute: Attribute[Any], value: object) -> None:
    good = (
        isinstance(value, str)
        and (value in ("cache", "none") or any(value.startswith(kind) and value != kind for kind in TOKEN_SOURCES[2:]))
        and len(value) <= MAX_SOURCE
        and "\0" not in value
        and is_unicode(value)
    )
    if not good:
        raise ConfigError.of("with_token_source", value, '"cache", "none", "literal:TOKEN", "env:NAME" or "path:FILE"')


def _is_beside_no_imatrix(instance: BuildSettings, attribute: Attribute[Any], value: object) -> None:
    if value is not None and instance.imatrix is not None:
        raise ConfigError.of("with_calibration_file", str(value), "nothing beside with_imatrix")


def _as_ranks(value: int | Literal["auto"] | None) -> int | Literal["auto"] | None:
    ranks: int | Literal["auto"] | None = plain(value)
    return ranks


def _are_ranks(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ConfigError.of(name_of(instance, attribute), value, f'an int >= 1 and <= {MAX_RANKS}, or "auto"')


def is_encoder_name(name: str) -> bool:
    """Tell whether a GGUF file, by its name, holds an image encoder (mmproj) and not a model."""
    return "mmproj" in Path(name).name.lower()


@frozen(kw_only=True)
class ModelSource:
    """Says which model to load.

    :ivar location: a path or a Hub id
    :ivar filename: the GGUF file below the location, or any part of a split model; None: the model found there
    :ivar gguf: True: look for GGUF files; False: for a Hugging Face checkpoint; None: for either
    :ivar mmproj: GGUF file of the image encoder: a path, or a file name at the location; None: the mmproj file there,
        if there is exactly one
    """

    location: str
    filename: str | None = None
    gguf: bool | None
    mmproj: str | None = None


@frozen
class AdapterSource:
    """Says which adapter to load.

    :ivar location: a path or a Hub id
    :ivar name: the name by which requests select the adapter
    """

    location: str
    name: str = field(validator=IsText())

    @classmethod
    def of(cls, setting: str, path: str | PathLike[str], name: str | None) -> AdapterSource:
        """Make an adapter source from a user's arguments.

        :param setting: name of the builder's method, for errors
        :param path: a path or a Hub id
        :param name: the adapter's name; None: the last part of the path
        :raises ConfigError: the path is invalid
        """
        location = path_text(setting, path, "a path or a hub id")
        return cls(location, Path(location).name.removesuffix(".gguf") if name is None else name)


def _adapters(value: Iterable[AdapterSource]) -> tuple[AdapterSource, ...]:
    adapters = tuple(value)
    names = [adapter.name for adapter in adapters]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError.of("with_adapter", name, "a name that no other adapter has")
    return adapters


@frozen(kw_only=True)
class DraftSource:
    """Says which draft model proposes tokens for another model.

    :ivar model: the draft model
    :ivar settings: its settings; only those of weights and files are used
    """

    model: ModelSource
    settings: BuildSettings


_CALLS: Final = MappingProxyType(
    {
        "adapters": "with_adapter",
        "draft": "draft_builder",
        "gamma": "with_speculation",
        "images": "with_image_limits",
        "mtp": "with_speculation",
        "paged_meta": "with_paged_attn",
        "revision": "with_hf_revision",
    }
)


def _is_beside_no_tokenizer(instance: BuildSettings, attribute: Attribute[Any], value: object) -> None:
    if value is not None and instance.tokenizer_json is not None:
        raise ConfigError.of("with_tok_model_id", value, "nothing beside with_tokenizer_json")


def _are_ranking_tokens(instance: object, attribute: Attribute[Any], value: tuple[object, object] | None) -> None:
    for text in value or ():
        if text is not None and not (isinstance(text, str) and text and is_unicode(text)):
            raise ConfigError.of("with_ranking_tokens", text, "a text that is one token")
    if value is not None and (value[0] is None or value[0] == value[1]):
        raise ConfigError.of("with_ranking_tokens", value[1], "another text than the first, or None")


@frozen(kw_only=True)
class BuildSettings:
    """Holds the explicit settings. None: taken from the environment, the checkpoint or the machine, in this order.

    :ivar tok_model_id: a tokenizer other than the checkpoint's: a directory, a file or a Hub id
    :ivar isq: the type to quantize weights to while loading
    :ivar topology: settings of single layers, which take precedence
    :ivar imatrix: llama.cpp's importance matrix, which weights the errors that quantization minimizes
    :ivar calibration_file: a text from which an importance matrix is collected
    :ivar isq_cache: a directory that caches quantized weights for the next start
    :ivar prefix_cache_dir: a directory that keeps blocks of the prefix cache
    :ivar batch_invariance: whether results must not depend on the number of rows in a step
    :ivar lean_memory: no effect: every model holds each quantized weight only once
    :ivar max_slowdown: maximum factor by which prefill may lengthen a step for decoding sequences; 0: no limit but the
        token budget
    :ivar gamma: maximum number of draft tokens per sequence and step; 0: no drafts
    :ivar mtp: whether the checkpoint's layer for multi-token prediction drafts
    :ivar token_healing: whether the last tokens of a prompt may be replaced by ones that also cover the start of the
        completion
    :ivar ranking_tokens: a ranking model's answers for relevant and for irrelevant documents; None as the second: only
        the first answer's logit counts
    :ivar images: limits of images; None: the model accepts no images
    :ivar draft: the draft model
    :ivar adapters: adapters to load with the model
    :ivar tensor_parallel: number of tensor-parallel ranks; "auto": one for each device of the model's kind; None: one,
        or the number of the topology's devices
    :ivar paged_attn: whether the KV cache is paged; True and False are explicit requests
    :ivar paged_meta: the settings of the KV pool; replaces those of the environment as a whole
    """

    dtype: str = field(default="auto", converter=_dtype)
    device: str = field(default="auto", validator=IsText())
    paged_attn: bool | None = field(default=None, validator=is_optional_bool)
    paged_meta: PagedAttentionMeta | None = field(default=None, validator=IsA(PagedAttentionMeta, optional=True))
    prefix_cache_n: int | None = field(default=None, converter=as_optional_int, validator=IntAtLeast(0, optional=True))
    prefix_cache_dir: PrefixCacheDir | None = field(default=None, validator=IsA(PrefixCacheDir, optional=True))
    max_num_seqs: int = field(default=32, converter=as_int, validator=IntAtLeast(1))
    max_queue: int = field(default=4096, converter=as_int, validator=IntAtLeast(1))
    max_num_batched_tokens: int | None = field(
        default=None, converter=as_optional_int, validator=IntAtLeast(1, optional=True)
    )
    max_slowdown: float | None = field(default=None, converter=as_optional_float, validator=is_optional_slowdown)
    max_model_len: int | None = field(default=None, converter=as_optional_int, validator=IntAtLeast(1, optional=True))
    logging: bool = field(default=False, validator=is_bool)
    throughput_logging: bool = field(default=False, validator=is_bool)
    chat_template: str | Path | None = field(default=None, validator=IsA((str, Path), "a template", optional=True))
    tokenizer_json: Path | None = field(default=None, validator=IsA(Path, optional=True))
    tok_model_id: str | None = field(default=None, validator=[IsText(optional=True), _is_beside_no_tokenizer])
    revision: str | None = field(default=None, validator=IsText(optional=True))
    token_source: str = field(default="cache", validator=_is_token_source)
    isq: IsqType | None = field(default=None, validator=IsA(IsqType, optional=True))
    topology: Topology | None = field(default=None, validator=IsA(Topology, optional=True))
    imatrix: Path | None = field(default=None, validator=IsA(Path, optional=True))
    calibration_file: Path | None = field(default=None, validator=[IsA(Path, optional=True), _is_beside_no_imatrix])
    isq_cache: Path | None = field(default=None, validator=IsA(Path, optional=True))
    batch_invariance: bool = field(default=False, validator=is_bool)
    gamma: int | None = field(default=None, validator=IntAtLeast(0, optional=True))
    mtp: bool | None = field(default=None, validator=is_optional_bool)
    ranking_tokens: tuple[str, str | None] | None = field(default=None, validator=_are_ranking_tokens)
    images: ImageLimits | None = field(default=None, validator=IsA(ImageLimits, optional=True))
    draft: DraftSource | None = field(default=None, validator=IsA(DraftSource, optional=True))
    adapters: tuple[AdapterSource, ...] = field(default=(), converter=_adapters)
    lean_memory: bool = field(default=False, validator=is_bool)
    token_healing: bool = field(default=False, validator=is_bool)
    tensor_parallel: int | Literal["auto"] | None = field(default=None, converter=_as_ranks, validator=_are_ranks)
    num_threads: int | None = field(
        default=None, converter=as_optional_int, validator=IntAtLeast(1, maximum=MAX_THREADS, optional=True)
    )

    @staticmethod
    def call_of(name: str) -> str:
        """Return the builder's method that sets a field, for errors to name."""
        return _CALLS.get(name, f"with_{name}")

    @property
    def is_to_be_divided(self) -> bool:
        """Tell whether tensor parallelism was requested, even if "auto" then finds a single device."""
        return self.tensor_parallel not in (None, 1) or (
            self.topology is not None and self.topology.devices is not None
        )
