"""Decides whether an assistant fits the model that it is to draft for, and which of that model's keys it reads."""

from __future__ import annotations

from pathlib import Path

from paged_sdk.config.assistant import AssistantConfig
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.layer_shape import LayerShape
from paged_sdk.errors import ConfigError, UnsupportedArchitectureError
from paged_sdk.kernels.placement import Placement
from paged_sdk.models.any_model import AnyModel
from paged_sdk.models.decoder import DecoderModel

__all__ = ["check_assistant", "kv_layers_read"]


def check_assistant(
    shape: DecoderConfig, path: Path, target: AnyModel | None = None, placement: Placement | None = None
) -> None:
    """Check whether an assistant can draft for a model; nothing is checked of models that are no assistants.

    :param path: its checkpoint
    :param target: the model; None: the assistant is to do something else, such as generating text itself
    :param placement: where it is to be; None: beside its target
    :raises UnsupportedArchitectureError: it can do nothing else
    :raises ConfigError: it was made for another model, or the model is divided or not on the CPU
    """
    own = shape.assistant
    if own is None:
        return
    if target is None:
        raise UnsupportedArchitectureError(
            f"{path.name} is an assistant, which only drafts for a model of hidden size {own.target_size}: load that "
            "model, with this one as its draft model",
            architecture=shape.model_type,
        )
    if (needed := _why_not(shape, own, target, placement or target.placement)) is not None:
        raise ConfigError(
            f"{path.name} cannot guess for this model: {needed}",
            setting="draft",
            value=str(path),
            allowed="the assistant of this model",
        )


def _why_not(shape: DecoderConfig, own: AssistantConfig, target: AnyModel, placement: Placement) -> str | None:
    """Return why an assistant cannot draft for a model; None if it can."""
    there = target.config
    if not isinstance(target, DecoderModel):
        return f"an assistant needs a decoder of this package, and a class of transformers computes {there.model_type}"
    if target.group is not None:
        return "ranks do not draft with assistants"
    for place in (target.placement, placement):
        if not place.is_one_device or place.embedding.type != "cpu":
            return f"both have to be on the CPU, and one is on {place}"
    if there.recurrent_layers:
        return "an assistant cannot read the states of recurrent layers"
    if own.target_size != there.hidden_size:
        return f"it is made for a hidden size of {own.target_size}, and this one's is {there.hidden_size}"
    if shape.vocab_size != there.vocab_size:
        return f"it has {shape.vocab_size} tokens, and this one {there.vocab_size}"
    for layer in range(shape.num_layers):
        source = _source(shape, layer, there)
        if source is None:
            kind = "without" if shape.sliding_windows[layer] is None else "with"
            return f"its layer {layer} needs a layer {kind} a sliding window here"
        needed, found = _heads(shape.layer(layer)), _heads(there.layer(source))
        if needed != found:
            return f"its layer {layer} reads {needed}, and layer {source} here has {found}"
    return None


def kv_layers_read(shape: DecoderConfig, target: DecoderConfig) -> list[int]:
    """Return for each layer of an assistant the target's layer over whose keys and values it attends."""
    sources = [_source(shape, layer, target) for layer in range(shape.num_layers)]
    found = [source for source in sources if source is not None]
    assert len(found) == len(sources), "check_assistant() refuses others"
    return found


def _source(shape: DecoderConfig, layer: int, target: DecoderConfig) -> int | None:
    """Return the last of the target's layers that keep keys and have a window, or of those that have none, like the
    assistant's layer; None: there is no such layer.
    """
    has_window = shape.sliding_windows[layer] is not None
    alike = [each for each in target.kv_layers if (target.sliding_windows[each] is not None) == has_window]
    return alike[-1] if alike else None


def _heads(shape: LayerShape) -> str:
    return f"{shape.num_kv_heads} KV heads of {shape.head_dim} elements"
