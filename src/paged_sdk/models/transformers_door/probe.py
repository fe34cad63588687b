"""Find out what attention a model of transformers computes, by running it on the meta device."""

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
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.kernels.relative_bias import RelativeBias
from paged_sdk.models.transformers_door.seam import POSITION_BIAS, SINKS, AttentionCall, Mask, attach
from paged_sdk.models.transformers_door.skeleton import refusal, untried

__all__ = ["AttentionLayer", "Findings", "inputs", "probe"]

_NUM_TOKENS: Final = 8

# Options of attention functions that do not affect the result, or repeat other arguments.
_WITHOUT_MEANING: Final = frozenset(
    {
        *("dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch"),
        "deterministic",
        SINKS,
    }
)

# Native kernels need a head_dim that is a multiple of 16. Heads are padded with zeros, which change no product.
_HEAD_MULTIPLE: Final = 16


@frozen
class AttentionLayer:
    """Describes one call of attention in a forward pass; the calls, in order, are the model's layers.

    :ivar head_dim: elements per head of queries and keys
    :ivar value_dim: elements per head of values
    :ivar scale: factor of the scores
    :ivar window: number of tokens that a query attends to, itself included; None: no window
    :ivar is_bidirectional: whether attention is bidirectional
    :ivar limit: the sequence length up to which this describes the masks; None: any length
    :ivar has_relative_bias: whether numbers are added to scores by distance
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    is_bidirectional: bool
    softcap: float | None
    limit: int | None
    has_relative_bias: bool


def inputs(token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a model of transformers for a batch of one sequence.

    :param token_ids: ``[num_tokens]``
    :param positions: ``[num_tokens]``, or ``[3, num_tokens]`` for three rotary positions per token
    """
    return {
        "input_ids": token_ids[None],
        "position_ids": positions[..., None, :],
        # Without a mask, transformers searches the positions for starts of packed sequences in every step.
        "attention_mask": torch.ones((1, len(token_ids)), dtype=torch.bool, device=token_ids.device),
        "use_cache": False,
    }


@frozen
class Findings:
    """Holds the results of the trial run.

    :ivar layers: the layers' attention, in the order of its calls
    :ivar body: name of the submodule that computes hidden states; empty: the whole model does, as an encoder
    :ivar blocks: names of the layers' modules, which contain the attention modules
    :ivar experts: names of modules that follow transformers' interface for experts
    :ivar read: names of linear layers and embeddings whose ``weight`` the class reads directly
    :ivar unused: names of linear layers that text does not use, such as those of an image encoder
    :ivar shared: names of linear layers that take other rows than the tokens too, such as embeddings of distances
    :ivar is_ranker: whether the class computes a text's score
    :ivar first_position: the class's number of the first position
    :ivar config: the model's shape, as the engine sees it
    """

    layers: tuple[AttentionLayer, ...]
    body: str
    blocks: tuple[str, ...]
    experts: tuple[str, ...]
    read: frozenset[str]
    unused: frozenset[str]
    shared: frozenset[str]
    is_ranker: bool
    first_position: int
    config: DecoderConfig


def probe(model: PreTrainedModel) -> Findings:
    """Run a copy of a model without values, and derive its shape from the calls of attention.

    :raises UnsupportedArchitectureError: the model needs attention that this package does not compute
    """
    try:
        return _run(nn.Module.to(copy.deepcopy(model), "meta"))
    except UnsupportedArchitectureError:
        raise
    except Exception:  # a class that reads values, for example the indices of selected experts
        pass
    try:
        return _run(_with_zeros(copy.deepcopy(model)))
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # a class may raise anything
        raise untried(str(model.config.model_type), type(model).__name__, error) from error


def _with_zeros(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model weights of zeros, whose pages take no memory because they are never written."""
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

    experts: dict[str, None] = {}

    def pass_by(module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        experts[names[module]] = None
        return torch.zeros_like(hidden)

    seam = attach(model, describe_masks=True)
    seam.attend, seam.mix = record, pass_by
    found, watched = _watch_bodies(model), _watch_weights(model)
    ids = torch.zeros(_NUM_TOKENS, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        output: Any = model(**inputs(ids, torch.zeros_like(ids)))
    if not calls:
        raise refusal(model_type, f"{class_name} does not use transformers' attention interface")
    logits: Tensor | None = getattr(output, "logits", None)
    is_ranker = class_name.endswith("ForSequenceClassification")
    if logits is not None and not is_ranker and any(call.is_bidirectional for call in calls):
        raise refusal(model_type, f"{class_name} is to generate text, and its tokens attend to later ones")
    bodies = [name for depth, name in found if depth == min(each for each, _ in found)] if logits is not None else [""]
    if len(bodies) != 1:
        raise refusal(model_type, f"{class_name} has {len(bodies)} parts that compute hidden states, not one")
    generates = logits is not None and not is_ranker
    vocab_size = logits.shape[-1] if logits is not None and generates else _table_of(model).num_embeddings
    first = 0 if generates else _first_position(model)
    shape = _shape(model, calls, vocab_size=vocab_size, first_position=first)
    return Findings(
        layers=tuple(calls),
        body=bodies[0],
        blocks=tuple(blocks),
        experts=tuple(experts),
        read=frozenset(watched.read),
        unused=frozenset(watched.unused),
        shared=frozenset(watched.shared),
        is_ranker=is_ranker,
        first_position=first,
        config=shape,
    )


def _first_position(model: PreTrainedModel) -> int:
    """Return an encoder's number of the first position. RoBERTa and its like count from ``padding_idx + 1``, and have a
    method that does so for given embeddings; ``row_check.py`` verifies it once weights are loaded.
    """
    modules: Iterable[Any] = model.modules()
    counting = (module for module in modules if hasattr(module, "create_position_ids_from_inputs_embeds"))
    return max((module.padding_idx + 1 for module in counting), default=0)


def _table_of(model: PreTrainedModel) -> nn.Embedding:
    """Return the token embeddings of an encoder."""
    table: object = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise refusal(str(model.config.model_type), "it has embeddings of its own kind")
    return table


def _numbered(name: str) -> str:
    """Return a module's name up to its last number, which is the name of its layer."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _watch_bodies(model: PreTrainedModel) -> list[tuple[int, str]]:
    """Return a list to which a run adds the depths and names of submodules that return hidden states. Logits are
    computed from those of the outermost one.
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


@frozen
class _Watched:
    """Collects names of layers while a model runs.

    :ivar read: linear layers and embeddings whose ``weight`` other modules read
    :ivar unused: linear layers that the run has not called
    :ivar shared: linear layers that it has called with other rows than its tokens
    """

    read: set[str]
    unused: set[str]
    shared: set[str]


def _watch_weights(model: PreTrainedModel) -> _Watched:
    """Return sets of names that a run updates."""
    seen = _Watched(set(), {name for name, module in model.named_modules() if type(module) is nn.Linear}, set())

    class WatchedLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.unused.discard(names[self])
            if x.numel() != _NUM_TOKENS * self.in_features:
                seen.shared.add(names[self])
            return x.new_zeros(*x.shape[:-1], self.out_features)

        def apart(self, x: Tensor) -> Tensor:
            seen.unused.discard(names[self])
            return x.new_zeros(len(x), self.out_features)

        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                seen.read.add(names[self])
            return super().__getattr__(name)

    class WatchedEmbedding(nn.Embedding):
        def forward(self, token_ids: Tensor) -> Tensor:
            table = self._parameters["weight"]
            assert table is not None
            return table.new_zeros(*token_ids.shape, self.embedding_dim)

        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                seen.read.add(names[self])
            return super().__getattr__(name)

    watched: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WatchedLinear, nn.Embedding: WatchedEmbedding}
    names = {module: name for name, module in model.named_modules() if type(module) in watched}
    for module in names:
        module.__class__ = watched[type(module)]
    return seen


def _layer(call: AttentionCall, model_type: str) -> AttentionLayer:
    """Describe one call of attention."""
    mask = Mask.of(call.mask)
    if mask.why_not is not None:
        raise refusal(model_type, mask.why_not)
    options = {name: value for name, value in call.options.items() if value is not None}
    if SINKS in options and options[SINKS].shape != (call.query.shape[1],):
        raise refusal(model_type, "its sinks are not one number for each head")
    scale, softcap = options.pop("scaling", None), options.pop("softcap", None)
    relative = options.pop(POSITION_BIAS, None)
    if relative is not None and not isinstance(relative, RelativeBias):
        raise refusal(model_type, f"its attention has {POSITION_BIAS}")
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
        is_bidirectional=mask.is_bidirectional,
        softcap=None if softcap is None else float(softcap),
        limit=mask.limit,
        has_relative_bias=relative is not None,
    )


def _shape(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], *, vocab_size: int, first_position: int
) -> DecoderConfig:
    """Describe the model as the engine sees it: the shape of its KV cache, and its context length.

    If layers have several head sizes, the cache has the largest.
    """
    config = model.config.get_text_config()
    model_type = str(model.config.model_type)
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    softcaps = {layer.softcap for layer in layers}
    if len(heads) > 1 or len(softcaps) > 1:
        raise refusal(model_type, "its layers have different numbers of heads, or caps of scores")
    if len({layer.is_bidirectional for layer in layers}) > 1:
        raise refusal(model_type, "tokens attend to later ones in some of its layers and not in others")
    ((num_heads, num_kv_heads),), (softcap,) = heads, softcaps
    if num_heads % num_kv_heads:
        raise refusal(model_type, f"{num_heads} heads cannot share {num_kv_heads} keys evenly")
    largest = max(max(layer.head_dim, layer.value_dim) for layer in layers)
    limits = [layer.limit for layer in layers if layer.limit is not None]
    max_position = min([_max_position(config) - first_position, *limits])
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and not getattr(config, "layer_types", None) and all(not each.window for each in layers):
        # The masks have no window, but transformers' own cache drops what is outside it.
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
        # A window of at least the context length has no effect.
        sliding_windows=tuple(
            None if layer.window is None or layer.window >= max_position else layer.window for layer in layers
        ),
        attention_scale=layers[0].scale,
        attention_softcap=softcap,
        relative_biases=any(layer.has_relative_bias for layer in layers),
        bidirectional=layers[0].is_bidirectional,
    )


def _max_position(config: Any) -> int:
    """Return the context length. With LongRoPE it is the original one, because the class has one set of frequencies for
    all rows of a step.
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
