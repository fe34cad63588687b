"""Defines ``Which``, the description of a runner's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, GgufModelBuilder, TextModelBuilder, Topology, VisionModelBuilder
from paged_sdk.mistralrs.adapters import LoraAdapter, adapters_field, limit_field, with_adapters
from paged_sdk.mistralrs.enums import (
    Architecture,
    EmbeddingArchitecture,
    IsqOrganization,
    ModelDType,
    MultimodalArchitecture,
    dtype_name,
)
from paged_sdk.mistralrs.refused import REFUSED, Refused
from paged_sdk.mistralrs.unsupported import is_optional, unsupported

__all__ = ["Builder", "Which"]

Builder: TypeAlias = TextModelBuilder | GgufModelBuilder | VisionModelBuilder
_Builder = TypeVar("_Builder", TextModelBuilder, GgufModelBuilder, VisionModelBuilder)


class Which(ABC):
    """Describes a model in one of six ways; each is a subclass, so ``match`` can tell them apart.

    - ``Which.Plain(model_id, arch=None, tokenizer_json=None, ...)``: a Hugging Face checkpoint
    - ``Which.Lora(model_id, adapters=None, arch=None, ...)``: the same, with LoRA adapters
    - ``Which.MultimodalPlain(model_id, arch=None, ...)``: a checkpoint with image input; also under its older name
      ``Which.VisionPlain``
    - ``Which.Embedding(model_id, arch=None, ...)``: an embedding model
    - ``Which.GGUF(quantized_model_id, quantized_filename, tok_model_id=None, ...)``: a GGUF file
    - ``Which.GGML(quantized_model_id, quantized_filename, tok_model_id=None, ...)``: a pre-GGUF llama file

    ``Which.LoraGGUF``, ``Which.LoraGGML``, ``Which.XLora``, ``Which.XLoraGGUF`` and ``Which.XLoraGGML`` raise a
    :class:`ConfigError` that names a replacement; ``Which.DiffusionPlain`` and ``Which.Speech`` have none.
    """

    if TYPE_CHECKING:
        Plain: type[Plain]
        Lora: type[Lora]
        MultimodalPlain: type[MultimodalPlain]
        VisionPlain: type[_MultimodalPlain]
        Embedding: type[Embedding]
        GGUF: type[GGUF]
        GGML: type[GGML]
        LoraGGUF: type[Refused]
        LoraGGML: type[Refused]
        XLora: type[Refused]
        XLoraGGUF: type[Refused]
        XLoraGGML: type[Refused]
        DiffusionPlain: type[Refused]
        Speech: type[Refused]

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the model's name in the runner."""

    @abstractmethod
    def builder(self) -> Builder:
        """Return the builder of this model.

        :raises ConfigError: invalid value
        """


@frozen
class Plain(Which):
    """Describes a Hugging Face checkpoint.

    :ivar model_id: a directory or Hub id
    :ivar arch: checked against the checkpoint, if given
    :ivar tokenizer_json: another tokenizer.json
    :ivar topology: a YAML file with quantization types and devices of single layers
    :ivar organization: ``IsqOrganization.MoQE`` quantizes only the experts of a mixture
    :ivar dtype: of activations and unquantized weights; also by name: "auto", "bfloat16" ...
    :ivar imatrix: a llama.cpp importance matrix, to weight quantization errors by
    :ivar calibration_file: a text to compute one from
    :ivar hf_revision: branch, tag or commit of the Hub repository
    """

    model_id: str
    arch: Architecture | None = field(default=None, validator=is_optional(Architecture))
    tokenizer_json: str | None = None
    topology: str | None = None
    organization: IsqOrganization | None = field(default=None, validator=is_optional(IsqOrganization))
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: ModelDType | str = ModelDType.Auto
    imatrix: str | None = None
    calibration_file: str | None = None
    auto_map_params: None = unsupported()
    hf_cache_path: None = unsupported()
    matformer_config_path: None = unsupported()
    matformer_slice_name: None = unsupported()
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.model_id

    def builder(self) -> TextModelBuilder:
        return _weighted(_configured(TextModelBuilder(self.model_id), self), self)


@frozen
class Lora(Which):
    """Describes a Hugging Face checkpoint with adapters, which requests name. Others may be loaded later.

    :ivar model_id: a directory or Hub id
    :ivar adapters: the adapters to load with it
    :ivar arch: as for :class:`Plain`, like the other fields
    """

    model_id: str
    adapters: Sequence[LoraAdapter] | None = adapters_field()
    arch: Architecture | None = field(default=None, validator=is_optional(Architecture))
    tokenizer_json: str | None = None
    topology: str | None = None
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: ModelDType | str = ModelDType.Auto
    auto_map_params: None = unsupported()
    hf_cache_path: None = unsupported()
    max_adapters: int = limit_field(16)
    max_rank: int = limit_field(256)
    max_bytes: int = limit_field(8 << 30)
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.model_id

    def builder(self) -> TextModelBuilder:
        return with_adapters(_configured(TextModelBuilder(self.model_id), self), self.adapters)


@frozen
class MultimodalPlain(Which):
    """Describes a Hugging Face checkpoint with image input.

    :ivar model_id: a directory or Hub id; the other fields are those of :class:`Plain`
    """

    model_id: str
    arch: MultimodalArchitecture | None = field(default=None, validator=is_optional(MultimodalArchitecture))
    tokenizer_json: str | None = None
    topology: str | None = None
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: ModelDType | str = ModelDType.Auto
    max_edge: None = unsupported()
    calibration_file: str | None = None
    imatrix: str | None = None
    auto_map_params: None = unsupported()
    hf_cache_path: None = unsupported()
    matformer_config_path: None = unsupported()
    matformer_slice_name: None = unsupported()
    organization: IsqOrganization | None = field(default=None, validator=is_optional(IsqOrganization))
    encoder_cache_memory_bytes: None = unsupported(kw_only=True)
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.model_id

    def builder(self) -> VisionModelBuilder:
        return _weighted(_configured(VisionModelBuilder(self.model_id), self), self)


@frozen
class Embedding(Which):
    """Describes a Hugging Face checkpoint of an embedding model. Other models can embed too.

    :ivar model_id: a directory or Hub id; the other fields are those of :class:`Plain`
    """

    model_id: str
    arch: EmbeddingArchitecture | None = field(default=None, validator=is_optional(EmbeddingArchitecture))
    tokenizer_json: str | None = None
    topology: str | None = None
    write_uqff: None = unsupported()
    from_uqff: None = unsupported()
    dtype: ModelDType | str = ModelDType.Auto
    hf_cache_path: None = unsupported()
    imatrix: str | None = None
    calibration_file: str | None = None
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.model_id

    def builder(self) -> TextModelBuilder:
        return _weighted(_configured(TextModelBuilder(self.model_id), self), self)


_MultimodalPlain: TypeAlias = MultimodalPlain  # within Which, MultimodalPlain is the attribute


def _configured(builder: _Builder, which: Plain | Lora | MultimodalPlain | Embedding) -> _Builder:
    builder = builder.with_dtype(dtype_name(which.dtype))
    if which.tokenizer_json is not None:
        builder = builder.with_tokenizer_json(which.tokenizer_json)
    if which.topology is not None:
        builder = builder.with_topology(Topology.from_yaml(which.topology))
    return builder if which.hf_revision is None else builder.with_hf_revision(which.hf_revision)


def _is_optional_file(instance: object, attribute: Attribute[Any], value: object) -> None:
    names = [value] if isinstance(value, str) else value
    if names is None:
        return
    if not isinstance(names, list | tuple) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError.of(attribute.name, value, "the name of one file, or None")


@frozen
class GGUF(Which):
    """Describes a GGUF file.

    :ivar quantized_model_id: the directory or Hub id that holds it
    :ivar quantized_filename: the file's name there; for a model in several files, their names
    :ivar tok_model_id: another tokenizer: a directory or Hub id with a tokenizer.json, or that file
    :ivar tokenizer_json: the same, as the path of that file
    :ivar topology: a YAML file with quantization types and devices of single layers
    :ivar dtype: of activations and of weights that the file does not quantize
    :ivar imatrix: a llama.cpp importance matrix, to weight quantization errors by
    :ivar calibration_file: a text to compute one from
    :ivar organization: ``IsqOrganization.MoQE`` quantizes only the experts of a mixture
    :ivar adapters: LoRA adapters to load with it, which requests name
    :ivar hf_revision: branch, tag or commit of the Hub repository
    :ivar mmproj_filename: the file of its image encoder, or that file's name in the directory or repository
    """

    quantized_model_id: str
    quantized_filename: str | Sequence[str]
    tok_model_id: str | None = None
    topology: str | None = None
    dtype: ModelDType | str = ModelDType.Auto
    auto_map_params: None = unsupported()
    tokenizer_json: str | None = field(default=None, kw_only=True)
    mmproj_filename: str | Sequence[str] | None = field(default=None, validator=_is_optional_file, kw_only=True)
    organization: IsqOrganization | None = field(default=None, validator=is_optional(IsqOrganization), kw_only=True)
    write_uqff: None = unsupported(kw_only=True)
    imatrix: str | None = field(default=None, kw_only=True)
    calibration_file: str | None = field(default=None, kw_only=True)
    max_edge: None = unsupported(kw_only=True)
    multimodal_auto_map_params: None = unsupported(kw_only=True)
    adapters: Sequence[LoraAdapter] | None = adapters_field(kw_only=True)
    max_adapters: int = limit_field(16, kw_only=True)
    max_rank: int = limit_field(256, kw_only=True)
    max_bytes: int = limit_field(8 << 30, kw_only=True)
    hf_cache_path: None = unsupported(kw_only=True)
    matformer_config_path: None = unsupported(kw_only=True)
    matformer_slice_name: None = unsupported(kw_only=True)
    encoder_cache_memory_bytes: None = unsupported(kw_only=True)
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.quantized_model_id

    def builder(self) -> GgufModelBuilder:
        builder = _weighted(_one_file(self), self)
        encoder = self.mmproj_filename
        if encoder is not None:
            builder = builder.with_mmproj(encoder if isinstance(encoder, str) else encoder[0])
        return with_adapters(builder, self.adapters)


def _is_optional_gqa(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError.of("gqa", value, "an int >= 1 or None")


@frozen
class GGML(Which):
    """Describes a pre-GGUF llama file of llama.cpp's (ggjt).

    :ivar quantized_model_id: the directory or Hub id that holds it
    :ivar quantized_filename: the file's name there
    :ivar tok_model_id: a tokenizer instead of the file's vocabulary: a directory or Hub id with a tokenizer.json, or
        that file
    :ivar tokenizer_json: the same, as the path of that file
    :ivar gqa: query heads per KV head; has no effect, as the file's shapes say it
    :ivar topology: a YAML file with quantization types and devices of single layers
    :ivar dtype: of activations and of weights that the file does not quantize
    :ivar hf_revision: branch, tag or commit of the Hub repository
    """

    quantized_model_id: str
    quantized_filename: str
    tok_model_id: str | None = None
    tokenizer_json: str | None = None
    gqa: int | None = field(default=None, validator=_is_optional_gqa)
    topology: str | None = None
    dtype: ModelDType | str = ModelDType.Auto
    auto_map_params: None = unsupported()
    hf_revision: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return self.quantized_model_id

    def builder(self) -> GgufModelBuilder:
        return _one_file(self)


def _weighted(builder: _Builder, which: Plain | MultimodalPlain | Embedding | GGUF) -> _Builder:
    """Return the builder with the importance matrix, or the text to compute one from, if given."""
    if which.imatrix is not None:
        builder = builder.with_imatrix(which.imatrix)
    return builder if which.calibration_file is None else builder.with_calibration_file(which.calibration_file)


def _one_file(which: GGUF | GGML) -> GgufModelBuilder:
    builder = GgufModelBuilder(which.quantized_model_id, which.quantized_filename).with_dtype(dtype_name(which.dtype))
    if which.tok_model_id is not None and which.tokenizer_json is not None:
        raise ConfigError.of("tokenizer_json", which.tokenizer_json, "nothing beside tok_model_id")
    if which.tokenizer_json is not None:
        builder = builder.with_tokenizer_json(which.tokenizer_json)
    if which.tok_model_id is not None:
        builder = builder.with_tok_model_id(which.tok_model_id)
    if which.topology is not None:
        builder = builder.with_topology(Topology.from_yaml(which.topology))
    return builder if which.hf_revision is None else builder.with_hf_revision(which.hf_revision)


for _variant in (Plain, Lora, MultimodalPlain, Embedding, GGUF, GGML, *REFUSED):
    # Shown as Which.Plain etc. in tracebacks and reprs.
    _name = _variant.__name__
    _variant.__qualname__ = f"Which.{_name}"
    setattr(Which, _name, _variant)
Which.VisionPlain = MultimodalPlain
