"""Say which model a runner holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, TypeVar

from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, GgufModelBuilder, TextModelBuilder, Topology
from paged_sdk.mistralrs.adapters import LoraAdapter, adapters_field, limit_field, with_adapters
from paged_sdk.mistralrs.unsupported import unsupported

__all__ = ["Architecture", "Which"]

_Builder = TypeVar("_Builder", TextModelBuilder, GgufModelBuilder)


class Architecture(Enum):
    """Names a family of models. It is optional everywhere: the checkpoint says which family it is."""

    Gemma2 = "gemma2"
    Gemma3 = "gemma3"
    Llama = "llama"
    Mistral = "mistral"
    Mixtral = "mixtral"
    Phi3 = "phi3"
    Qwen2 = "qwen2"
    Qwen3 = "qwen3"
    Qwen3Moe = "qwen3_moe"

    def check(self, loaded: str) -> None:
        """Compare with the family that was loaded.

        :param loaded: the model's ``model_type``
        :raises ConfigError: it is another family
        """
        if loaded.removesuffix("_text") != self.value:
            raise ConfigError.of("arch", self, f"the checkpoint's own, {loaded}, or None")


class Which(ABC):
    """Describes a model in one of four ways; each is a subclass, so ``match`` can tell them apart.

    - ``Which.Plain(model_id, arch=None, tokenizer_json=None, ...)``: a Hugging Face checkpoint
    - ``Which.Lora(model_id, adapters=None, arch=None, ...)``: the same, with LoRA adapters
    - ``Which.GGUF(quantized_model_id, quantized_filename, tok_model_id=None, ...)``: a GGUF file
    - ``Which.GGML(quantized_model_id, quantized_filename, tok_model_id=None, ...)``: a llama file of before GGUF

    ``Which.LoraGGUF``, ``Which.LoraGGML``, ``Which.XLora``, ``Which.XLoraGGUF`` and ``Which.XLoraGGML`` say what takes
    their place: making one is a :class:`ConfigError`.
    """

    if TYPE_CHECKING:
        Plain: type[Plain]
        Lora: type[Lora]
        GGUF: type[GGUF]
        GGML: type[GGML]
        LoraGGUF: type[_LoraGGUF]
        LoraGGML: type[_LoraGGML]
        XLora: type[_XLora]
        XLoraGGUF: type[_XLoraGGUF]
        XLoraGGML: type[_XLoraGGML]

    @abstractmethod
    def builder(self) -> TextModelBuilder | GgufModelBuilder:
        """Return the builder of this model.

        :raises ConfigError: a value that cannot be used
        """


def _is_architecture(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, Architecture):
        raise ConfigError.of("arch", value, "None or one of " + ", ".join(map(str, Architecture)))


@frozen
class Plain(Which):
    """Describes a Hugging Face checkpoint.

    :ivar model_id: a directory, or a hub id
    :ivar arch: checked against the checkpoint, if given
    :ivar tokenizer_json: a tokenizer.json instead of the checkpoint's tokenizer
    :ivar topology: a YAML file that says what single layers are quantized to, and where they are
    :ivar dtype: "auto", "bfloat16", "float16", "float32" ...
    :ivar imatrix: an importance matrix of llama.cpp's, by which errors of quantized weights are weighted
    :ivar calibration_file: a text from which one is collected
    :ivar hf_revision: a branch, tag or commit of the hub's repository
    """

    model_id: str
    arch: Architecture | None = field(default=None, validator=_is_architecture)
    tokenizer_json: str | None = None
    topology: str | None = None
    organization: None = unsupported()
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: str = "auto"
    imatrix: str | None = None
    calibration_file: str | None = None
    auto_map_params: None = unsupported()
    hf_cache_path: None = unsupported()
    matformer_config_path: None = unsupported()
    matformer_slice_name: None = unsupported()
    hf_revision: str | None = field(default=None, kw_only=True)

    def builder(self) -> TextModelBuilder:
        return _weighted(_checkpoint(self), self)


@frozen
class Lora(Which):
    """Describes a Hugging Face checkpoint with adapters, which requests name. Others may be loaded later.

    :ivar model_id: a directory, or a hub id
    :ivar adapters: those that are loaded with it
    :ivar arch: see :class:`Plain`; the others likewise
    """

    model_id: str
    adapters: Sequence[LoraAdapter] | None = adapters_field()
    arch: Architecture | None = field(default=None, validator=_is_architecture)
    tokenizer_json: str | None = None
    topology: str | None = None
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: str = "auto"
    auto_map_params: None = unsupported()
    hf_cache_path: None = unsupported()
    max_adapters: int = limit_field(16)
    max_rank: int = limit_field(256)
    max_bytes: int = limit_field(8 << 30)
    hf_revision: str | None = field(default=None, kw_only=True)

    def builder(self) -> TextModelBuilder:
        return with_adapters(_checkpoint(self), self.adapters)


def _checkpoint(which: Plain | Lora) -> TextModelBuilder:
    builder = TextModelBuilder(which.model_id).with_dtype(which.dtype)
    if which.tokenizer_json is not None:
        builder = builder.with_tokenizer_json(which.tokenizer_json)
    if which.topology is not None:
        builder = builder.with_topology(Topology.from_yaml(which.topology))
    return builder if which.hf_revision is None else builder.with_hf_revision(which.hf_revision)


@frozen
class GGUF(Which):
    """Describes a GGUF file.

    :ivar quantized_model_id: the directory or hub id that holds it
    :ivar quantized_filename: the file's name there; for a model in several files, their names
    :ivar tok_model_id: a directory with a tokenizer.json, or that file, instead of the file's own tokenizer
    :ivar tokenizer_json: the same, as the path of that file
    :ivar topology: a YAML file that says what single layers are quantized to, and where they are
    :ivar dtype: the dtype of activations, and of weights that the file does not quantize
    :ivar imatrix: an importance matrix of llama.cpp's, by which errors of quantized weights are weighted
    :ivar calibration_file: a text from which one is collected
    :ivar adapters: LoRA adapters that are loaded with it, which requests name
    :ivar hf_revision: a branch, tag or commit of the hub's repository
    """

    quantized_model_id: str
    quantized_filename: str | Sequence[str]
    tok_model_id: str | None = None
    topology: str | None = None
    dtype: str = "auto"
    auto_map_params: None = unsupported()
    tokenizer_json: str | None = field(default=None, kw_only=True)
    mmproj_filename: None = unsupported()
    organization: None = unsupported()
    write_uqff: None = unsupported()
    imatrix: str | None = None
    calibration_file: str | None = None
    max_edge: None = unsupported()
    multimodal_auto_map_params: None = unsupported()
    adapters: Sequence[LoraAdapter] | None = adapters_field(kw_only=True)
    max_adapters: int = limit_field(16, kw_only=True)
    max_rank: int = limit_field(256, kw_only=True)
    max_bytes: int = limit_field(8 << 30, kw_only=True)
    hf_revision: str | None = field(default=None, kw_only=True)

    def builder(self) -> GgufModelBuilder:
        return with_adapters(_weighted(_one_file(self), self), self.adapters)


def _is_optional_gqa(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError.of("gqa", value, "an int >= 1 or None")


@frozen
class GGML(Which):
    """Describes a llama file of llama.cpp's of before GGUF (ggjt).

    :ivar quantized_model_id: the directory or hub id that holds it
    :ivar quantized_filename: the file's name there
    :ivar tok_model_id: a directory with a tokenizer.json, or that file, instead of the file's own vocabulary
    :ivar tokenizer_json: the same, as the path of that file
    :ivar gqa: heads of queries for each of keys, which the file's shapes tell: it may be given, and is not asked
    :ivar topology: a YAML file that says what single layers are quantized to, and where they are
    :ivar dtype: the dtype of activations, and of weights that the file does not quantize
    :ivar hf_revision: a branch, tag or commit of the hub's repository
    """

    quantized_model_id: str
    quantized_filename: str
    tok_model_id: str | None = None
    tokenizer_json: str | None = None
    gqa: int | None = field(default=None, validator=_is_optional_gqa)
    topology: str | None = None
    dtype: str = "auto"
    auto_map_params: None = unsupported()
    hf_revision: str | None = field(default=None, kw_only=True)

    def builder(self) -> GgufModelBuilder:
        return _one_file(self)


def _weighted(builder: _Builder, which: Plain | GGUF) -> _Builder:
    """Return the builder with what errors of quantized weights are to be weighted by."""
    if which.imatrix is not None:
        builder = builder.with_imatrix(which.imatrix)
    return builder if which.calibration_file is None else builder.with_calibration_file(which.calibration_file)


def _one_file(which: GGUF | GGML) -> GgufModelBuilder:
    builder = GgufModelBuilder(which.quantized_model_id, which.quantized_filename).with_dtype(which.dtype)
    if which.tok_model_id is not None and which.tokenizer_json is not None:
        raise ConfigError.of("tokenizer_json", which.tokenizer_json, "nothing beside tok_model_id")
    if which.tokenizer_json is not None:
        builder = builder.with_tokenizer_json(which.tokenizer_json)
    if which.tok_model_id is not None:
        builder = builder.with_tokenizer_json(_tokenizer_json(which.tok_model_id))
    if which.topology is not None:
        builder = builder.with_topology(Topology.from_yaml(which.topology))
    return builder if which.hf_revision is None else builder.with_hf_revision(which.hf_revision)


class _Refused(Which):
    """Stands for a way to describe a model that this version does not have.

    :cvar instead: what there is in its place
    """

    instead: ClassVar[str]

    def __new__(cls, *values: object, **settings: object) -> NoReturn:
        raise ConfigError.of("which", cls.__qualname__, cls.instead)


_WEIGHED: Final = (
    "a model with LoRA adapters that requests name: X-LoRA, which weighs them for each token, is not supported"
)


class _LoraGGUF(_Refused):
    instead = "Which.GGUF(..., adapters=[LoraAdapter(alias, source)]), whose requests name their adapter"


class _LoraGGML(_Refused):
    instead = "Which.GGUF or Which.Lora with adapters: files of before GGUF have none"


class _XLora(_Refused):
    instead = f"Which.Lora, {_WEIGHED}"


class _XLoraGGUF(_Refused):
    instead = f"Which.GGUF(..., adapters=[...]), {_WEIGHED}"


class _XLoraGGML(_Refused):
    instead = f"Which.GGUF(..., adapters=[...]), {_WEIGHED}"


for _variant in (Plain, Lora, GGUF, GGML, _LoraGGUF, _LoraGGML, _XLora, _XLoraGGUF, _XLoraGGML):
    # Read as variants of the one type, in tracebacks and reprs too.
    _name = _variant.__name__.removeprefix("_")
    _variant.__qualname__ = f"Which.{_name}"
    setattr(Which, _name, _variant)


def _tokenizer_json(tok_model_id: str) -> Path:
    try:
        path = Path(tok_model_id).expanduser()
        exists = path.exists()
    except (TypeError, ValueError, OSError, RuntimeError):  # no path, or one that no system has
        path, exists = Path(), False
    if not exists:
        allowed = "a directory with a tokenizer.json, or that file (or nothing: a GGUF file holds its tokenizer)"
        raise ConfigError.of("tok_model_id", tok_model_id, allowed)
    return path / "tokenizer.json" if path.is_dir() else path
