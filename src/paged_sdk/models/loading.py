"""Build a model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.placement import Placement
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.checkpoint_layout import read_shape, stored_table
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import load_decoder_layer
from paged_sdk.models.family import ranks_texts
from paged_sdk.models.layer_inputs import load_layer_inputs
from paged_sdk.models.loading_threads import loading_threads
from paged_sdk.models.norms import load_norm
from paged_sdk.models.rank_head import RANK_HEAD, load_rank_head
from paged_sdk.models.sharded import SharedEmbedding, SharedHead
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import WHOLE, shard_of, token_slices
from paged_sdk.quant.adapted import AdaptableShape
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["load_model", "reload_model"]


def load_model(
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    dtype: torch.dtype,
    placement: Placement | torch.device,
    policy: WeightPolicy = DENSE,
    on_progress: Callable[[int, int], None] | None = None,
    num_threads: int = 1,
    group: Group | None = None,
) -> DecoderModel:
    """Build a model, loading each weight once, directly to its final place.

    With any number of threads, the error raised is that of the first wrong tensor in the order of the layers.

    :param config: ``config.json``'s content
    :param source: the weights; stays open, and tensors that the model does not use are not read
    :param dtype: dtype of weights, activations, keys and values
    :param placement: the devices of the model's parts, or the device of the whole model
    :param policy: chooses the form of each matrix; by default matrices are decoded
    :param on_progress: called with the number of tensors loaded and the number of all tensors, on the thread that
        loaded one; an exception from it ends loading
    :param num_threads: number of layers loaded at once, each on its own thread; 1: on the calling thread
    :param group: the ranks that the model is divided among, including this one; None: the model is not divided
    :raises UnsupportedArchitectureError: no family has this ``model_type``, or the checkpoint is a classifier with
        several labels
    :raises CheckpointError: the config is invalid, or a tensor is missing or has another shape than the config implies
    """
    shape, names = read_shape(config, source)
    places = placement if isinstance(placement, Placement) else Placement.on(placement, shape.num_layers)
    shard = WHOLE if group is None else shard_of(shape, group.rank, group.size)
    loader = WeightLoader(
        source,
        policy,
        dtype=dtype,
        device=places.embedding,
        prefixes=(names.body, names.head, f"{RANK_HEAD}."),
        on_progress=on_progress,
        shard=shard,
        group=group,
    )
    # Of clustered tokens, thousands of rows are looked up for a draft: packed rows, 16 to a panel, take three times as
    # long.
    clustered = shape.assistant is not None and shape.assistant.num_clusters > 0
    tables = loader.decoding() if clustered else loader
    rank_head = load_rank_head(loader.at(places.layers[-1]), shape) if ranks_texts(config) else None
    with loading_threads(num_threads) as pool:
        # The largest matrices first, so that none is left to load alone at the end.
        table = pool.submit(_load_embedding, tables, shape, names)
        inputs = pool.submit(load_layer_inputs, loader, shape, names)
        is_shared = shape.tie_embeddings and places.head == places.embedding
        projection = None if is_shared else pool.submit(_load_head, loader.at(places.head), shape, names)
        pending = [
            pool.submit(load_decoder_layer, loader.at(place), shape, names, layer)
            for layer, place in enumerate(places.layers)
        ]
        embedding, layer_inputs, layers = table.result(), inputs.result(), [layer.result() for layer in pending]
        head = (
            tables.tied_head(names.head, embedding, vocab_size=shape.vocab_size)
            if projection is None
            else projection.result()
        )
    model = DecoderModel(
        shard.local(shape),
        embedding=_embedding_of(group, embedding, shape, dtype),
        layers=layers,
        norm=load_norm(loader.at(places.layers[-1]), shape, names.body + names.norms.last),
        head=_head_of(group, head, shape),
        embedding_norm=load_norm(loader, shape, names.body + names.norms.embedding) if shape.embedding_norm else None,
        ropes={settings: RotaryEmbedding(settings, device=places.embedding) for settings in dict.fromkeys(shape.ropes)},
        dtype=dtype,
        placement=places,
        adaptable=[*loader.adaptable, _adaptable_embedding(shape, names, places.embedding)],
        head_name=names.head,
        embedding_name=names.table.removesuffix(".weight"),
        group=group,
        rank_head=rank_head,
        layer_inputs=layer_inputs,
    )
    loader.close()
    return model


def reload_model(
    model: DecoderModel,
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    policy: WeightPolicy,
    parts: Iterable[int],
    on_replaced: Callable[[int], None],
    on_progress: Callable[[int, int], None] | None = None,
    num_threads: int = 1,
) -> None:
    """Reload weights of a model, replacing part by part. The caller must hold no other reference to the old weights.

    After an error, some parts may be new and others old. Other parameters and errors are those of :func:`load_model`.

    :param parts: numbers of layers; the number of layers stands for embeddings and output projection
    :param on_replaced: called with each part just before the model's old one is dropped
    """
    places, group = model.placement, model.group
    shape, names = read_shape(config, source)
    loader = WeightLoader(
        source,
        policy,
        dtype=model.dtype,
        device=model.device,
        prefixes=(names.body, names.head),
        on_progress=on_progress,
        shard=WHOLE if group is None else shard_of(shape, group.rank, group.size),
        group=group,
    )

    def replace(part: int) -> None:
        if part < shape.num_layers:
            layer = load_decoder_layer(loader.at(places.layers[part]), shape, names, part)
            on_replaced(part)
            model.replace_layer(part, layer)
            return
        # Each of the old matrices is dropped before another is loaded.
        is_shared = shape.tie_embeddings and places.head == places.embedding
        if shape.layer_inputs is not None:
            inputs = load_layer_inputs(loader, shape, names)
            on_replaced(part)
            model.layer_inputs = inputs
            del inputs
        if not is_shared:
            head = _load_head(loader.at(places.head), shape, names)
            on_replaced(part)
            model.head = _head_of(group, head, shape)
        table = _load_embedding(loader, shape, names)
        if is_shared:
            on_replaced(part)
        model.embedding = _embedding_of(group, table, shape, model.dtype)
        if is_shared:
            model.head = _head_of(group, loader.tied_head(names.head, table, vocab_size=shape.vocab_size), shape)

    with loading_threads(num_threads) as pool:
        for pending in [pool.submit(replace, part) for part in parts]:
            pending.result()
    loader.close()


def _embedding_of(group: Group | None, own: Embedding, shape: DecoderConfig, dtype: torch.dtype) -> Embedding:
    """Return the embeddings of all tokens, which the ranks of a group divide."""
    if group is None:
        return own
    return SharedEmbedding(own, token_slices(shape.vocab_size, group.size)[group.rank], group, dtype=dtype)


def _head_of(group: Group | None, own: Linear, shape: DecoderConfig) -> Linear:
    """Return the output projection to all tokens, which the ranks of a group divide."""
    return own if group is None else SharedHead(own, token_slices(shape.vocab_size, group.size), group)


def _adaptable_embedding(config: DecoderConfig, names: TensorNames, device: torch.device) -> AdaptableShape:
    """Describe the embeddings to adapters, transposed: as a matrix with a column per token."""
    name = names.table.removesuffix(".weight")
    return AdaptableShape({name: slice(0, config.hidden_size)}, config.vocab_size, device)


def _load_embedding(loader: WeightLoader, config: DecoderConfig, names: TensorNames) -> Embedding:
    return loader.embedding(
        stored_table(loader, config, names),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        scale=config.embedding_scale,
    )


def _load_head(loader: WeightLoader, config: DecoderConfig, names: TensorNames) -> Linear:
    if config.tie_embeddings:  # but on another device than the embeddings
        table = stored_table(loader, config, names)
        return loader.untied_head(names.head, table, vocab_size=config.vocab_size, hidden_size=config.hidden_size)
    return loader.linear(
        [names.head],
        in_features=config.hidden_size,
        out_features=(config.vocab_size,),
        bias=config.head_bias,
        is_head=True,
        rows=(loader.shard.tokens(config.vocab_size),),
    )
