"""Ask a model of transformers what attention it computes, by running it without numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.models.transformers_door.seam import SINKS, AttentionCall, Mask, attach
from paged_sdk.models.transformers_door.skeleton import refusal

__all__ = ["AttentionLayer", "Findings", "inputs", "probe"]

_NUM_TOKENS: Final = 8

# Options of attention functions that say nothing about the result, or what the rest of the call says too.
_WITHOUT_MEANING: Final = frozenset(
    {
        *("dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch"),
        "deterministic",
        SINKS,
    }
)

# The native kernels take heads of multiples of 16 elements. Zeros beyond a head's own change no product.
_HEAD_MULTIPLE: Final = 16


@frozen
class AttentionLayer:
    """Describes one call of attention in a forward pass; in the order of the calls they are the model's layers.

    :ivar head_dim: elements per head of queries and keys
    :ivar value_dim: elements per head of values
    :ivar scale: multiplies q.k
    :ivar both_ways: whether tokens attend to later ones, too
    :ivar limit: the length of texts up to which its masks are these; None: any
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    both_ways: bool
    softcap: float | None
    limit: int | None


def inputs(token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return what a model of transformers is called with, for tokens that are one row to it.

    :param token_ids: ``[num_tokens]``
    :param positions: ``[num_tokens]``, or ``[3, num_tokens]`` where tokens of images have three
    """
    return {
        "input_ids": token_ids[None],
        "position_ids": positions[..., None, :],
        # Without a mask, transformers looks in every step for where texts begin.
        "attention_mask": torch.ones((1, len(token_ids)), dtype=torch.bool, device=token_ids.device),
        "use_cache": False,
    }


@frozen
class Findings:
    """Holds what a run without numbers has shown.

    :ivar layers: what attention computes, in the order of its calls
    :ivar body: the name of the part of the model that computes hidden states; empty: all of it does, an encoder
    :ivar read: the names of linear layers and embeddings whose weight the class reads itself
    :ivar blocks: the names of the modules that are the layers, of which attention is a part
    :ivar unused: the names of linear layers that texts do not go through, such as those of an image encoder
    :ivar is_ranker: whether the class makes one number of a text
    :ivar first_position: what the class calls the position of a text's first token
    :ivar config: the model's shape, as the engine sees it
    """

    layers: tuple[AttentionLayer, ...]
    body: str
    blocks: tuple[str, ...]
    read: frozenset[str]
    unused: frozenset[str]
    is_ranker: bool
    first_position: int
    config: DecoderConfig


def probe(model: PreTrainedModel) -> Findings:
    """Run a model's copy without numbers, and read its shape off the calls of attention.

    :raises UnsupportedArchitectureError: the model computes something else than the attention of this package does
    """
    try:
        return _run(nn.Module.to(copy.deepcopy(model), "meta"))
    except UnsupportedArchitectureError:
        raise
    except Exception:  # classes that ask what numbers are, for instance which experts were chosen
        pass
    try:
        return _run(_with_zeros(copy.deepcopy(model)))
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # whatever a class does with arguments that it does not know
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        name = type(model).__name__
        raise refusal(str(model.config.model_type), f"{name} cannot be tried ({shown(reason)})") from error


def _with_zeros(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model weights of zeros, which take no memory until they are written."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


def _run(model: PreTrainedModel) -> Findings:
    model_type, class_name = str(model.config.model_type), type(model).__name__
    calls: list[AttentionLayer] = []
    blocks: dict[str, None] = {}
    names = {module: name for name, module in model.named_modules()}

    def record(call: AttentionCall) -> Tensor:
        calls.append(_layer(call, model_type))
        blocks[_numbered(names.get(call.module, ""))] = None
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(1, num_tokens, num_heads, call.value.shape[-1])

    attach(model, describe_masks=True).attend = record
    found, (read, unused) = _watch_bodies(model), _watch_weights(model)
    ids = torch.zeros(_NUM_TOKENS, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        output: Any = model(**inputs(ids, torch.zeros_like(ids)))
    if not calls:
        raise refusal(model_type, f"{class_name} does not use transformers' attention interface")
    logits: Tensor | None = getattr(output, "logits", None)
    is_ranker = class_name.endswith("ForSequenceClassification")
    if logits is not None and not is_ranker and any(call.both_ways for call in calls):
        raise refusal(model_type, f"{class_name} is to generate text, and its tokens attend to later ones")
    bodies = [name for depth, name in found if depth == min(each for each, _ in found)] if logits is not None else [""]
    if len(bodies) != 1:
        raise refusal(model_type, f"{class_name} has {len(bodies)} parts that compute hidden states, not one")
    generates = logits is not None and not is_ranker
    vocab_size = logits.shape[-1] if logits is not None and generates else _table_of(model).num_embeddings
    first = 0 if generates else _first_position(model)
    shape = _shape(model, calls, vocab_size=vocab_size, first_position=first)
    return Findings(tuple(calls), bodies[0], tuple(blocks), frozenset(read), frozenset(unused), is_ranker, first, shape)


def _first_position(model: PreTrainedModel) -> int:
    """Return what an encoder calls the first position: RoBERTa and its like count from after their padding token's
    number. That it is so is tried once there are weights.
    """
    modules: Iterable[Any] = model.modules()
    counting = (module for module in modules if hasattr(module, "create_position_ids_from_input_ids"))
    return max((module.padding_idx + 1 for module in counting), default=0)


def _table_of(model: PreTrainedModel) -> nn.Embedding:
    """Return the token embeddings of an encoder."""
    table: object = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise refusal(str(model.config.model_type), "it has embeddings of its own kind")
    return table


def _numbered(name: str) -> str:
    """Return the part of a module's name up to its last number: the layer that it is a part of."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _watch_bodies(model: PreTrainedModel) -> list[tuple[int, str]]:
    """Return a list to which a run adds the names of those parts that give hidden states, and how deep they are: scores
    are computed from what the one nearest to the model gives.
    """
    found: list[tuple[int, str]] = []
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(name: str, module: nn.Module, args: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth >= 1 and isinstance(getattr(output, "last_hidden_state", None), Tensor):
            found.append((depth, name))

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(partial(leave, name))
    return found


def _watch_weights(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Return a set to which a run adds the names of those linear layers and embeddings whose weight is asked for from
    outside, and one from which it takes the names of those linear layers that it goes through.
    """
    found: set[str] = set()
    unused = {name for name, module in model.named_modules() if type(module) is nn.Linear}

    class WatchedLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            unused.discard(names[self])
            return x.new_zeros(*x.shape[:-1], self.out_features)

        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                found.add(names[self])
            return super().__getattr__(name)

    class WatchedEmbedding(nn.Embedding):
        def forward(self, token_ids: Tensor) -> Tensor:
            table = self._parameters["weight"]
            assert table is not None
            return table.new_zeros(*token_ids.shape, self.embedding_dim)

        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                found.add(names[self])
            return super().__getattr__(name)

    watched: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WatchedLinear, nn.Embedding: WatchedEmbedding}
    names = {module: name for name, module in model.named_modules() if type(module) in watched}
    for module in names:
        module.__class__ = watched[type(module)]
    return found, unused


def _layer(call: AttentionCall, model_type: str) -> AttentionLayer:
    """Read what one call asks for."""
    mask = Mask.of(call.mask)
    if mask.why_not is not None:
        raise refusal(model_type, mask.why_not)
    options = {name: value for name, value in call.options.items() if value is not None}
    if SINKS in options and options[SINKS].shape != (call.query.shape[1],):
        raise refusal(model_type, "its sinks are not one number for each head")
    scale, softcap = options.pop("scaling", None), options.pop("softcap", None)
    if "indices" in options:
        raise refusal(model_type, "it keeps other states of a text than keys and values (an index of its keys)")
    unknown = sorted(options.keys() - _WITHOUT_MEANING)
    if unknown:
        raise refusal(model_type, f"its attention has {', '.join(unknown)}")
    _, num_heads, _, head_dim = call.query.shape
    if scale is None:
        scale = head_dim**-0.5
    if not isinstance(scale, float | int) or not isinstance(softcap, float | int | None):
        raise refusal(model_type, "its scores are scaled by more than one number")
    return AttentionLayer(
        num_heads=num_heads,
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        value_dim=call.value.shape[-1],
        scale=float(scale),
        window=mask.window,
        both_ways=mask.both_ways,
        softcap=None if softcap is None else float(softcap),
        limit=mask.limit,
    )


def _shape(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], *, vocab_size: int, first_position: int
) -> DecoderConfig:
    """Describe the model as the engine sees it: what its cache holds and how far its texts go.

    Heads of several sizes lie in a cache of the largest.
    """
    config = model.config.get_text_config()
    model_type = str(model.config.model_type)
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    softcaps = {layer.softcap for layer in layers}
    if len(heads) > 1 or len(softcaps) > 1:
        raise refusal(model_type, "its layers have different numbers of heads, or caps of scores")
    if len({layer.both_ways for layer in layers}) > 1:
        raise refusal(model_type, "tokens attend to later ones in some of its layers and not in others")
    ((num_heads, num_kv_heads),), (softcap,) = heads, softcaps
    if num_heads % num_kv_heads:
        raise refusal(model_type, f"{num_heads} heads cannot share {num_kv_heads} keys evenly")
    largest = max(max(layer.head_dim, layer.value_dim) for layer in layers)
    limits = [layer.limit for layer in layers if layer.limit is not None]
    max_position = min([_max_position(config) - first_position, *limits])
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and not getattr(config, "layer_types", None) and all(not each.window for each in layers):
        # transformers' own cache forgets what is beyond the window, though the masks say nothing of it.
        max_position = min(max_position, window)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.hidden_size),
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=-(-largest // _HEAD_MULTIPLE) * _HEAD_MULTIPLE,
        max_position=max_position,
        norm_eps=0.0,
        ropes=(),
        # A window of at least the longest text is none.
        sliding_windows=tuple(
            None if layer.window is None or layer.window >= max_position else layer.window for layer in layers
        ),
        attention_scale=layers[0].scale,
        attention_softcap=softcap,
        bidirectional=layers[0].both_ways,
    )


def _max_position(config: Any) -> int:
    """Return the tokens of context: of models that rotate longer texts otherwise, the length up to which they do not,
    since a step computes texts of all lengths together.
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            break
    else:
        length = 2048
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [section for section in (rope, *rope.values()) if isinstance(section, dict)]
    switches = [
        section.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for section in sections
        if section.get("rope_type") == "longrope" and section.get("short_factor") != section.get("long_factor")
    ]
    return min([length, *(switch for switch in switches if isinstance(switch, int))])
