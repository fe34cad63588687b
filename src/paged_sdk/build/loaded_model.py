"""Loads a model's weights and tokenizer, in the form that its settings request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from attrs import evolve, frozen

from paged_sdk.attention.choice import Candidate
from paged_sdk.build.assistant_fit import check_assistant
from paged_sdk.build.collector import collector_paused
from paged_sdk.build.device_setup import weights_must_fit
from paged_sdk.build.encoder_file import EncoderFile
from paged_sdk.build.importance import CheckpointImportance, load_importance
from paged_sdk.build.isq_cache import with_isq_cache
from paged_sdk.build.kv_cache_type import check_cache_type
from paged_sdk.build.loading import Loading
from paged_sdk.build.location import hub_token
from paged_sdk.build.mtp_choice import loads_mtp
from paged_sdk.build.placement import PlacedNames, choose_devices, common_dtype, place_model
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.ranking import find_ranking
from paged_sdk.build.sizing import resolve_max_model_len
from paged_sdk.build.stateful import check_stateful, refuse_ranks
from paged_sdk.build.topology import check_topology
from paged_sdk.build.vision import LoadedVision, load_encoder_file, load_vision
from paged_sdk.build.vocabulary import check_vocabulary
from paged_sdk.build.weight_form import weight_policy
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.ranking import RankRecipe
from paged_sdk.config.topology import Topology
from paged_sdk.errors import ConfigError, ModelLoadError
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.models.any_model import AnyModel, ModelPlan, plan_model
from paged_sdk.models.assistant import AssistantWeights, load_assistant_weights
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import has_head
from paged_sdk.models.mtp_module import MtpWeights, load_mtp_weights, mtp_names
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import SETTING, shard_of, token_slices
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.system.threads import thread_must_start
from paged_sdk.weights.checkpoint import Checkpoint, file_stamps, open_checkpoint
from paged_sdk.weights.embedding_recipe import read_recipe
from paged_sdk.weights.hub import resolve_tokenizer
from paged_sdk.weights.mmproj.source import Mmproj

__all__ = ["LoadedModel", "check_division", "load_weights", "place"]

_log = get_logger(__name__)


@frozen(kw_only=True)
class LoadedModel:
    """Holds a model's weights, and what loading them has determined.

    :ivar text: tokenizer and chat template; only rank 0 has them
    :ivar settings: the model's settings
    :ivar is_quantized: whether the matrices are quantized
    :ivar model_type: the checkpoint's ``model_type``; with an image encoder it may differ from the decoder's
    :ivar path: directory or file of the checkpoint
    :ivar files: the checkpoint's files with their :func:`paged_sdk.weights.checkpoint.file_stamps`
    :ivar placed: the device of each tensor
    :ivar recipe: how the model embeds and ranks texts
    :ivar shape: shape of the whole model, of which a rank may hold a shard
    :ivar why_no_text: why the model cannot generate text, and what it does instead; None: it generates text
    :ivar vision: image support; None: the model accepts no images
    :ivar importance: weights the errors that quantization minimizes; None: unweighted
    :ivar backends: attention backends to try before those of attention/choice.py
    :ivar mtp: the model's layer for multi-token prediction; None: it does not draft with one
    :ivar assistant: what makes a decoder an assistant, which drafts for another model; None: it is no assistant
    """

    model: AnyModel
    _text: TextProcessor | None
    settings: BuildSettings
    dtype: torch.dtype
    max_model_len: int
    is_quantized: bool
    model_type: str
    path: Path
    files: Mapping[Path, tuple[int, int]]
    placed: PlacedNames
    recipe: EmbeddingRecipe
    shape: DecoderConfig
    why_no_text: str | None = None
    vision: LoadedVision | None = None
    importance: CheckpointImportance | None = None
    backends: tuple[Candidate, ...] = ()
    mtp: MtpWeights | None = None
    assistant: AssistantWeights | None = None

    @property
    def placement(self) -> Placement:
        """Return the device of each layer, of the embeddings and of the output projection."""
        return self.placed.placement

    @property
    def text(self) -> TextProcessor:
        """Return the tokenizer and the chat template."""
        assert self._text is not None, "a rank that follows another reads no text"
        return self._text


def load_weights(loading: Loading, *, group: Group | None = None, target: AnyModel | None = None) -> LoadedModel:
    """Load weights and tokenizer in parallel. An assistant has its target's tokenizer and dtype.

    :param group: the ranks that the weights are divided among; only rank 0 loads the tokenizer and image support
    :param target: the model that this one is to draft for; None: it generates text itself
    """
    path, settings, device, workspace = loading.path, loading.settings, loading.device, loading.workspace
    is_first = group is None or group.rank == 0  # only rank 0 opens the file of an image encoder
    file = loading.encoder if is_first else None
    dtype = common_dtype(settings.dtype, choose_devices(settings, device))
    files = file_stamps(path)
    checkpoint = open_checkpoint(path)
    encoder: Mmproj | None = None
    try:
        if file is not None:
            encoder = file.open(checkpoint.config, path)
        plan = plan_model(checkpoint.config, dtype, images=settings.images is not None)
        shape = plan.config
        if target is None:
            check_assistant(shape, path)
        if target is not None and shape.assistant is not None:
            dtype = target.dtype  # that of the keys which it reads
        reads_text = is_first and shape.assistant is None
        max_model_len = resolve_max_model_len(settings, shape)
        if group is not None:
            _check_division(plan, checkpoint, group.size)
        own_names = () if encoder is None else encoder.names()
        placed = place(settings.topology, device, plan, checkpoint, own_names, is_checked=is_first)
        placement = placed.placement
        if target is not None:
            check_assistant(shape, path, target, placement)
        check_stateful(shape, settings, loading.environment, placement)
        has_decoder = placed.tensor_names is not None
        known = placed.tensor_names
        has_layer = known is not None and mtp_names(checkpoint.source, known, shape.num_layers) is not None
        with_mtp = loads_mtp(loading, placement, name=path.name, has_layer=has_layer, is_divided=group is not None)
        check_cache_type(shape, settings, loading.environment, placement, has_decoder=has_decoder)
        importance = load_importance(checkpoint, settings, loading.check_cancelled)
        policy = weight_policy(checkpoint, settings, loading.environment, dtype, placed, workspace, importance)
        with (
            with_isq_cache(path, files, settings, policy, device, group, with_mtp=with_mtp) as keeping,
            ThreadPoolExecutor(1, thread_name_prefix="paged-sdk tokenizer") as beside,
            weights_must_fit(path, placement.devices),
            LoadingBar(f"Loading {path.name}", visible=settings.logging) as bar,
        ):
            text_beside = None
            if reads_text:
                with thread_must_start("to make a tokenizer in"):
                    text_beside = beside.submit(_text_processor, checkpoint, settings, shape.vocab_size)

            def progress(done: int, total: int) -> None:
                loading.check_cancelled()
                if text_beside is not None and text_beside.done():
                    text_beside.result()  # raises the tokenizer's error, which ends loading
                bar.update(done, total)

            try:
                model = plan.load(
                    checkpoint.source,
                    dtype=dtype,
                    placement=placement,
                    policy=keeping,
                    on_progress=progress,
                    num_threads=1 if workspace is None else workspace.num_threads,
                    group=group,
                )
                mtp = None
                if with_mtp:
                    assert isinstance(model, DecoderModel), "no other model has such a layer"
                    mtp = load_mtp_weights(checkpoint.config, checkpoint.source, model, keeping)
                assistant = None
                if shape.assistant is not None:
                    assert isinstance(model, DecoderModel), "no other model is an assistant"
                    assistant = load_assistant_weights(checkpoint.source, model, keeping)
            finally:  # an error of the tokenizer takes precedence over one of the weights
                text = None if text_beside is None else text_beside.result()
        said = read_recipe(checkpoint, shape.hidden_size)
        why_no_text = _why_no_text(checkpoint, said, is_bidirectional=shape.bidirectional)
        ranking = None if text is None else find_ranking(checkpoint, model, shape, text, settings)
        recipe = _recipe(path.name, said, ranking, is_bidirectional=shape.bidirectional)
        if why_no_text is not None:
            makes_vectors = said.why_not or "embed() makes vectors of texts"
            does = makes_vectors if ranking is None else "rank() says how well texts go together"
            why_no_text = f"{why_no_text}; {does}"
        if text is None:
            vision = None
        elif file is not None and encoder is not None:
            vision, text = _encoder(file, encoder, model, text, settings, policy)
        else:
            vision = None if settings.images is None else _vision(checkpoint, model, text, settings, policy)
    finally:
        checkpoint.source.close()
        if encoder is not None:
            encoder.close()
    loading.check_cancelled()
    is_quantized = policy.makes_quantized(checkpoint.is_quantized)
    return LoadedModel(
        model=model,
        text=text,
        settings=settings,
        dtype=dtype,
        max_model_len=max_model_len,
        is_quantized=is_quantized,
        model_type=checkpoint.model_type,
        path=path,
        files=files,
        placed=placed,
        recipe=recipe,
        shape=shape,
        why_no_text=why_no_text,
        vision=vision,
        importance=importance,
        backends=loading.backends,
        mtp=mtp,
        assistant=assistant,
    )


def check_division(loading: Loading, size: int) -> None:
    """Check whether a model can be divided among ranks. Only the headers of its files are read.

    :param size: number of ranks
    :raises ConfigError: the model cannot be divided
    :raises ModelLoadError: the model cannot be loaded at all
    """
    settings = loading.settings
    checkpoint = open_checkpoint(loading.path)
    try:
        dtype = common_dtype(settings.dtype, choose_devices(settings, loading.device))
        plan = plan_model(checkpoint.config, dtype, images=settings.images is not None)
        _check_division(plan, checkpoint, size)
    finally:
        checkpoint.source.close()


def _check_division(plan: ModelPlan, checkpoint: Checkpoint, size: int) -> None:
    if plan.tensor_names(checkpoint.source) is None:
        allowed = f"a model of a family that has a decoder here, which {plan.config.model_type} has not"
        raise ConfigError.of(SETTING, size, allowed)
    refuse_ranks(plan.config, SETTING, size)
    shard_of(plan.config, 0, size).local(plan.config)
    token_slices(plan.config.vocab_size, size)


def _recipe(name: str, said: EmbeddingRecipe, ranking: RankRecipe | None, *, is_bidirectional: bool) -> EmbeddingRecipe:
    """Return how texts are embedded and ranked.

    :param said: the checkpoint's settings; those of a ranker are empty, or have modules without a pooling
    """
    says_nothing = said == EmbeddingRecipe()
    if ranking is not None and said.pooling is None and (is_bidirectional or not says_nothing):
        return evolve(said, why_not=f"{name} ranks texts, and makes no vectors of them", ranking=ranking)
    if ranking is not None or not says_nothing or not is_bidirectional:
        return evolve(said, ranking=ranking)
    _log.info("%s names no pooling: embeddings are the mean of the hidden states.", name)
    return EmbeddingRecipe(pooling="mean")


def _why_no_text(checkpoint: Checkpoint, recipe: EmbeddingRecipe, *, is_bidirectional: bool) -> str | None:
    """Return why a checkpoint cannot generate text; None if it can."""
    if is_bidirectional:
        return f"{checkpoint.path.name} is an encoder, whose tokens attend to later ones, too"
    if checkpoint.metadata is not None:
        if recipe == EmbeddingRecipe():
            return None
        return f"{checkpoint.path.name} has a pooling_type: it was made for something else than text"
    if has_head(checkpoint.config):
        return None
    return f"{checkpoint.path.name} has no output projection (architectures = {checkpoint.config['architectures']})"


def _vision(
    checkpoint: Checkpoint, model: AnyModel, text: TextProcessor, settings: BuildSettings, policy: WeightPolicy
) -> LoadedVision:
    """Load a model's image support."""
    limits = settings.images
    assert limits is not None
    if isinstance(model, DecoderModel):
        return load_vision(
            checkpoint,
            text.tokenizer,
            limits,
            policy,
            topology=settings.topology,
            dtype=model.dtype,
            device=model.device,
        )
    from paged_sdk.build.vision_door import load_vision_door  # imports transformers, which takes 1.8 s
    from paged_sdk.models.transformers_door.model import TransformersModel

    assert isinstance(model, TransformersModel)
    return load_vision_door(checkpoint.path, model, text.tokenizer, limits)


def _encoder(
    file: EncoderFile,
    encoder: Mmproj,
    model: AnyModel,
    text: TextProcessor,
    settings: BuildSettings,
    policy: WeightPolicy,
) -> tuple[LoadedVision | None, TextProcessor]:
    """Load the image encoder of a GGUF model; None if it cannot be used and images were not requested.

    :returns: also the text processor, whose chat template may have changed
    """
    try:
        return load_encoder_file(
            encoder,
            text,
            settings.images or ImageLimits(),
            policy,
            topology=settings.topology,
            dtype=model.dtype,
            device=model.device,
        )
    except (ModelLoadError, ConfigError) as error:
        if file.is_asked:
            raise
        file.leave_out(error)
        return None, text


def place(
    topology: Topology | None,
    device: torch.device,
    plan: ModelPlan,
    checkpoint: Checkpoint,
    encoder: Iterable[str] = (),
    *,
    is_checked: bool = True,
) -> PlacedNames:
    """Decide the device of each tensor of a checkpoint.

    :param encoder: names of the tensors in an image encoder's separate file
    :param is_checked: whether to check that the topology matches the names
    """
    names = (*checkpoint.source.names(), *encoder)
    if topology is not None and is_checked:
        check_topology(topology, num_layers=plan.config.num_layers, names=names)
    own = plan.tensor_names(checkpoint.source)
    placement = place_model(topology, device, num_layers=plan.config.num_layers, names=names, tensor_names=own)
    for layer, there in enumerate(placement.layers):
        if there != placement.layers[source := plan.config.kv_layer(layer)]:
            allowed = f"one device for layers {source} and {layer}, which attends over the keys of layer {source}"
            raise ConfigError.of("topology", str(topology), allowed)
    return PlacedNames(placement, names, own)


def _text_processor(checkpoint: Checkpoint, settings: BuildSettings, vocab_size: int) -> TextProcessor:
    """Make the text processor, and compare its vocabulary with the model's."""
    tokenizer = _expanded(settings.tokenizer_json)
    if settings.tok_model_id is not None:
        tokenizer = resolve_tokenizer(settings.tok_model_id, token=hub_token(settings.token_source))
    given = {"chat_template": _expanded(settings.chat_template), "tokenizer_json": tokenizer}
    with collector_paused():
        text = (
            load_text_processor(checkpoint.path, **given)
            if checkpoint.metadata is None
            else text_processor_from_gguf(checkpoint.metadata, **given)
        )
    is_own = checkpoint.metadata is not None and tokenizer is None
    check_vocabulary(text.tokenizer, vocab_size, checkpoint.path, is_own=is_own)
    return text


def _expanded(given: str | Path | None) -> str | Path | None:
    """Return a path with the home directory in place of ``~``; a template's text as it is."""
    return Path(os.path.expanduser(given)) if isinstance(given, Path) else given
