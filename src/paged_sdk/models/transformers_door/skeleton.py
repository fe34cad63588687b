"""Make a model of transformers from a config.json, with buffers but without weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.models.transformers_door.rewriting import rewrite
from paged_sdk.models.transformers_door.seam import IMPLEMENTATION, register

__all__ = ["make_skeleton", "refusal", "untried"]

# Functions that use torch's default dtype if none is given; setting that default would affect the whole process.
_FACTORIES: Final = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.linspace)

# Sections of configs for other modalities than text.
_OTHER_MODALITIES: Final = ("vision_config", "audio_config", "vision_tokenizer_config", "vq_config")

# Layer types in configs whose only state is keys and values.
_ATTENTION_KINDS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})

# Ends the names of classes of the encoder of an encoder and a decoder.
_ENCODER_OF_TWO: Final = "EncoderModel"


def refusal(model_type: str, reason: str) -> UnsupportedArchitectureError:
    """Return the error for a model that transformers' classes cannot run here.

    :param reason: completes "it cannot run through transformers' classes: ..."
    """
    return UnsupportedArchitectureError(
        f"model_type {shown(model_type)} has no decoder here, and cannot run through transformers' classes: {reason}",
        architecture=model_type,
    )


def untried(model_type: str, what: str, error: Exception) -> UnsupportedArchitectureError:
    """Return the error for a class that cannot be tried.

    :param what: what was to be run
    :param error: what the class raised
    """
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return refusal(model_type, f"{what} cannot be tried ({shown(reason)})")


def make_skeleton(config: Mapping[str, Any], dtype: torch.dtype, *, images: bool = False) -> PreTrainedModel:
    """Make a model with computed buffers, on the CPU, and parameters on the ``meta`` device.

    :param config: config.json's content
    :param dtype: the dtype of the model's parameters and buffers, unless the class sets another
    :param images: whether the class must accept images
    :raises UnsupportedArchitectureError: transformers has no class of this ``model_type`` that generates text or
        encodes texts, or the class cannot be made
    """
    model_type = str(config.get("model_type", ""))
    if not images and (encoder := _encoder_class(model_type, config)) is not None:
        auto = AutoModelForTextEncoding if encoder.endswith(_ENCODER_OF_TWO) else AutoModel
        return _made(model_type, config, dtype, encoder, auto, **_without_pooler(encoder))
    if not images and (ranker := _ranker_class(model_type, config)) is not None:
        return _made(model_type, config, dtype, ranker, AutoModelForSequenceClassification)
    class_name = _image_class(model_type) if images else _text_class(model_type, config)
    names = config.get("architectures") or [class_name]
    if not any(str(name) == class_name or str(name).endswith("ForCausalLM") for name in names):
        raise refusal(model_type, f"its architectures are {shown(names)}, not {class_name}")
    return _made(model_type, config, dtype, class_name, AutoModelForImageTextToText if images else AutoModelForCausalLM)


def _made(
    model_type: str, config: Mapping[str, Any], dtype: torch.dtype, class_name: str, auto: Any, **options: Any
) -> PreTrainedModel:
    """Make a model by one of transformers' auto classes.

    :param class_name: name of the class that is made, for error messages
    :param auto: the auto class
    """
    images = auto is AutoModelForImageTextToText
    register()
    try:
        made = _config(model_type, config)
        kinds = set(getattr(made.get_text_config(decoder=True), "layer_types", None) or ()) - _ATTENTION_KINDS
        if kinds:
            raise _stateful(model_type, class_name, f" (in layers of {', '.join(sorted(kinds))})")
        with _WithoutWeights(dtype):
            # Image encoders keep transformers' own attention.
            attention: Any = {"": IMPLEMENTATION, "text_config": IMPLEMENTATION} if images else IMPLEMENTATION
            model: Any = auto.from_config(
                made,
                attn_implementation=attention,
                experts_implementation=IMPLEMENTATION,
                dtype=torch.float32,
                **options,
            )
    except KeyError as error:
        if error.args == (IMPLEMENTATION,):  # the class has its own table of attention implementations
            raise refusal(model_type, f"{class_name} does not use transformers' attention interface") from error
        raise _unmade(model_type, class_name, error) from error
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # a class may raise anything for a config
        raise _unmade(model_type, class_name, error) from error
    if model._is_stateful:
        raise _stateful(model_type, class_name)
    rewrite(model)
    _join_tied_embeddings(model)
    made_model: PreTrainedModel = model.eval().requires_grad_(False)
    return made_model


def _join_tied_embeddings(model: PreTrainedModel) -> None:
    """Make embeddings that share a weight one module, as which they are loaded, whatever form they get."""
    modules = dict(model.named_modules())
    for name, source in dict(model.all_tied_weights_keys).items():
        own, other = (modules.get(each.removesuffix(".weight")) for each in (name, source))
        if type(own) is nn.Embedding and type(other) is nn.Embedding:
            model.set_submodule(name.removesuffix(".weight"), other)


def _unmade(model_type: str, class_name: str, error: Exception) -> UnsupportedArchitectureError:
    return refusal(model_type, f"{class_name} cannot be made ({shown(str(error))})")


def _stateful(model_type: str, class_name: str, where: str = "") -> UnsupportedArchitectureError:
    return refusal(model_type, f"{class_name} keeps other states of a text than keys and values{where}")


def _encoder_class(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return the name of a text encoder's class without a head; None if the checkpoint is no encoder.

    A ``model_type`` with a class for masked language modelling is an encoder, unless the config is a decoder's. So is a
    checkpoint of the encoder of an encoder and a decoder (T5EncoderModel).
    """
    half = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(model_type, "")
    if half.endswith(_ENCODER_OF_TWO) and half in map(str, config.get("architectures") or ()):
        return half
    if model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.get("is_decoder") or config.get("vision_config"):
        return None
    class_name = MODEL_MAPPING_NAMES.get(model_type)
    if not isinstance(class_name, str):  # a tuple of classes, such as Funnel's with and without its decoder
        return None
    own = {class_name, MODEL_FOR_MASKED_LM_MAPPING_NAMES[model_type]}
    unsaid = [] if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else [class_name]
    return class_name if own.intersection(map(str, config.get("architectures") or unsaid)) else None


def _ranker_class(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return the name of a class for sequence classification over an encoder; None if the checkpoint is no such class.

    :raises UnsupportedArchitectureError: the class has several labels
    """
    class_name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if class_name is None or model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return None
    if class_name not in (config.get("architectures") or ()):
        return None
    try:
        num_labels = _config(model_type, config).num_labels
    except Exception as error:  # a class may raise anything for a config
        raise _unmade(model_type, class_name, error) from error
    if num_labels != 1:
        raise refusal(model_type, f"{class_name} has {num_labels} labels; classes with one label can rank texts")
    return class_name


def _without_pooler(class_name: str) -> dict[str, bool]:
    """Return the option that omits an encoder's pooling layer, which not all checkpoints hold."""
    accepted = inspect.signature(getattr(transformers, class_name).__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}


def _text_class(model_type: str, config: Mapping[str, Any]) -> str:
    """Return the name of a text-only class that generates text.

    :raises UnsupportedArchitectureError: there is none
    """
    _must_be_known(model_type)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise refusal(model_type, "it is for more than text: try VisionModelBuilder")
    if name is None:
        raise refusal(
            model_type, "transformers has no class of this name that generates text or is an encoder of texts"
        )
    parts = [part for part in _OTHER_MODALITIES if config.get(part) is not None]
    parts += [part for part in CONFIG_MAPPING[model_type].sub_configs if part == "text_config"]
    if parts or name.endswith("ForConditionalGeneration"):
        raise refusal(model_type, f"it is for more than text ({', '.join(parts) or name})")
    return name


def _image_class(model_type: str) -> str:
    """Return the name of a class that takes images and generates text.

    :raises UnsupportedArchitectureError: there is none, or the class has no ``get_image_features``
    """
    _must_be_known(model_type)
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if name is None:
        raise refusal(model_type, "transformers has no class of this name that takes images and generates text")
    if not hasattr(getattr(transformers, name), "get_image_features"):
        raise refusal(model_type, f"{name} has no call that makes vectors of images (get_image_features)")
    return name


def _must_be_known(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        raise refusal(model_type, f"transformers {transformers.__version__} does not know it; a newer one may")


def _config(model_type: str, content: Mapping[str, Any]) -> PreTrainedConfig:
    """Make transformers' config, without fields that name the checkpoint's own code, quantization or dtype."""
    left_out = ("auto_map", "quantization_config", "torch_dtype", "dtype", "_attn_implementation")
    made = CONFIG_MAPPING[model_type].from_dict({key: value for key, value in content.items() if key not in left_out})
    assert isinstance(made, PreTrainedConfig)
    made.use_cache = False
    return made


class _WithoutWeights(TorchFunctionMode):
    """Makes uninitialized tensors (parameters) on the meta device, and gives other new tensors the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _FACTORIES and given.get("dtype") is None:
            given["dtype"] = self._dtype
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)
