"""Loads a model's weights and tokenizer, in the form that its settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from attrs import evolve, frozen

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup, KvStorage
from paged_sdk.attention.choice import CANDIDATES, Candidate, choose_storage
from paged_sdk.attention.divided import DividedBackend, divided_storage
from paged_sdk.build.collector import collector_paused
from paged_sdk.build.device_setup import weights_must_fit
from paged_sdk.build.encoder_file import EncoderFile, find_encoder_file
from paged_sdk.build.importance import CheckpointImportance, load_importance
from paged_sdk.build.isq_cache import with_isq_cache
from paged_sdk.build.placement import PlacedNames, choose_devices, common_dtype, place_model
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.sizing import resolve_max_model_len
from paged_sdk.build.topology import check_topology, isq_by_name
from paged_sdk.build.vision import LoadedVision, load_encoder_file, load_vision
from paged_sdk.build.vocabulary import check_vocabulary
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import ISQ, Environment, read_variable
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.topology import Topology
from paged_sdk.errors import CheckpointError, ConfigError, ModelLoadError
from paged_sdk.files import read_text
from paged_sdk.kernels.attention_inputs import Products
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.own_pages import LastingMemory
from paged_sdk.kernels.placement import Placement, working_on
from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger
from paged_sdk.models.any_model import AnyModel, ModelPlan, plan_model
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import has_head
from paged_sdk.models.fused_decoder import FusedDecoderModel, FusedLayers, why_not_fused
from paged_sdk.models.key_offsets import key_offsets
from paged_sdk.models.spanned_decoder import SpannedDecoderModel
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import SETTING, shard_of
from paged_sdk.quant.isq import has_groups, is_for_gpus
from paged_sdk.quant.native_block import FEW_ROWS
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.threads import thread_must_start
from paged_sdk.weights.checkpoint import Checkpoint, file_stamps, open_checkpoint
from paged_sdk.weights.embedding_recipe import read_recipe
from paged_sdk.weights.hub import resolve_model, resolve_tokenizer
from paged_sdk.weights.mmproj import Mmproj

__all__ = [
    "LoadedModel",
    "check_isq",
    "encoder_file",
    "fuse",
    "hub_token",
    "load_weights",
    "make_storage",
    "model_path",
    "place",
    "unfused",
    "weight_policy",
]

_log = get_logger(__name__)


@frozen
class LoadedModel:
    """Holds a model's weights, and what was found out about them on the way.

    :ivar text: its tokenizer and chat template, which ranks that follow another have not
    :ivar settings: how the model was asked to be
    :ivar is_quantized: whether its matrices are
    :ivar path: where its files lie
    :ivar files: what they were, as :func:`paged_sdk.weights.checkpoint.file_stamps` says it
    :ivar placed: which of its tensors are on which device
    :ivar recipe: how its texts become vectors
    :ivar shape: the model's, of which a rank may hold a part
    :ivar why_no_text: why it cannot generate text; None: it can
    :ivar vision: what the model needs to take images; None: it takes none
    :ivar importance: what errors of weights that are quantized are weighted by; None: nothing
    :ivar backends: what may keep its KV before what attention/choice.py lists
    """

    model: AnyModel
    _text: TextProcessor | None
    settings: BuildSettings
    dtype: torch.dtype
    max_model_len: int
    is_quantized: bool
    path: Path
    files: Mapping[Path, tuple[int, int]]
    placed: PlacedNames
    recipe: EmbeddingRecipe
    shape: DecoderConfig
    why_no_text: str | None = None
    vision: LoadedVision | None = None
    importance: CheckpointImportance | None = None
    backends: tuple[Candidate, ...] = ()

    @property
    def placement(self) -> Placement:
        """Return what is on which device."""
        return self.placed.placement

    @property
    def shape_of_all_ranks(self) -> DecoderConfig:
        """Return the model's shape with as many key-value heads as all ranks hold together, of a model that is divided
        among some.
        """
        size = self.settings.tensor_parallel
        held = sum(len(shard_of(self.shape, rank, size).kv_heads) for rank in range(size))
        return evolve(self.shape, num_kv_heads=held)

    @property
    def text(self) -> TextProcessor:
        """Return the tokenizer and the chat template."""
        assert self._text is not None, "a rank that follows another reads no text"
        return self._text


def model_path(source: ModelSource, settings: BuildSettings) -> Path:
    """Return where a model lies, which may have to be downloaded first."""
    return resolve_model(
        source.location,
        filenames=source.filenames,
        revision=settings.revision,
        token=hub_token(settings.token_source),
        gguf=source.gguf,
    )


def encoder_file(source: ModelSource, settings: BuildSettings, model: Path) -> EncoderFile | None:
    """Return where a GGUF model's image encoder lies, if it has one, which may have to be downloaded first.

    :param model: the decoder's file
    """
    return find_encoder_file(
        source,
        model,
        revision=settings.revision,
        token=hub_token(settings.token_source),
        wants_images=settings.images is not None,
    )


def load_weights(
    path: Path,
    settings: BuildSettings,
    environment: Environment,
    device: torch.device,
    workspace: Workspace | None,
    go_on: Callable[[], None],
    file: EncoderFile | None = None,
    *,
    group: Group | None = None,
) -> LoadedModel:
    """Load weights and tokenizer at the same time.

    :param device: of what the settings' topology puts on no other
    :param file: the image encoder of a GGUF model
    :param group: the ranks that the weights are divided among; those after the first read no text
    """
    dtype = common_dtype(settings.dtype, choose_devices(settings, device))
    files = file_stamps(path)
    checkpoint = open_checkpoint(path)
    encoder: Mmproj | None = None
    try:
        if file is not None:
            encoder = file.open(checkpoint.config, path)
        plan = plan_model(checkpoint.config, dtype, images=settings.images is not None)
        shape = plan.config
        max_model_len = resolve_max_model_len(settings, shape)
        if group is not None and plan.tensor_names(checkpoint.source) is None:
            allowed = f"a model of a family that has a decoder here, which {shape.model_type} has not"
            raise ConfigError.of(SETTING, group.size, allowed)
        placed = place(settings.topology, device, plan, checkpoint, () if encoder is None else encoder.names())
        placement = placed.placement
        importance = load_importance(checkpoint, settings, go_on)
        policy = weight_policy(checkpoint, settings, environment, dtype, placed, workspace, importance)
        with (
            with_isq_cache(path, files, settings, policy, device, group) as keeping,
            ThreadPoolExecutor(1, thread_name_prefix="paged-sdk tokenizer") as beside,
            weights_must_fit(path, placement.devices),
            LoadingBar(f"Loading {path.name}", visible=settings.logging) as bar,
        ):
            text_beside = None
            if group is None or group.rank == 0:
                with thread_must_start("to make a tokenizer in"):
                    text_beside = beside.submit(_text_processor, checkpoint, settings, shape.vocab_size)

            def progress(done: int, total: int) -> None:
                go_on()
                if text_beside is not None and text_beside.done():
                    text_beside.result()  # whose error ends the loading
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
            finally:  # an error of the tokenizer goes before one of the weights
                text = None if text_beside is None else text_beside.result()
        recipe = read_recipe(checkpoint)
        why_no_text = _why_no_text(checkpoint, recipe, is_bidirectional=shape.bidirectional)
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
    go_on()
    is_quantized = policy.makes_quantized(checkpoint.is_quantized)
    return LoadedModel(
        model,
        text,
        settings,
        dtype,
        max_model_len,
        is_quantized,
        path,
        files,
        placed,
        recipe,
        shape,
        why_no_text,
        vision,
        importance,
    )


def _why_no_text(checkpoint: Checkpoint, recipe: EmbeddingRecipe, *, is_bidirectional: bool) -> str | None:
    """Say why a checkpoint cannot generate text; None: it can."""
    if checkpoint.metadata is not None:
        if recipe == EmbeddingRecipe():
            return None
        return f"{checkpoint.path.name} has a pooling_type: it was made for something else than text"
    if is_bidirectional:
        return f"{checkpoint.path.name} is an encoder, whose tokens attend to later ones, too"
    if has_head(checkpoint.config):
        return None
    return f"{checkpoint.path.name} has no output projection (architectures = {checkpoint.config['architectures']})"


def _vision(
    checkpoint: Checkpoint, model: AnyModel, text: TextProcessor, settings: BuildSettings, policy: WeightPolicy
) -> LoadedVision:
    """Load what a model needs to take images."""
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
    """Load the image encoder of a GGUF model; None: it cannot be used, and nobody has asked for it."""
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
) -> PlacedNames:
    """Decide where the tensors of a checkpoint are to be.

    :param encoder: the names of an image encoder's that are in a file of its own
    """
    names = (*checkpoint.source.names(), *encoder)
    if topology is not None:
        check_topology(topology, num_layers=plan.config.num_layers, names=names)
    own = plan.tensor_names(checkpoint.source)
    placement = place_model(topology, device, num_layers=plan.config.num_layers, names=names, tensor_names=own)
    return PlacedNames(placement, names, own)


def make_storage(loaded: LoadedModel, config: EngineConfig, workspace: Workspace | None) -> KvStorage:
    """Choose what keeps a model's KV, each layer's on its own device."""
    placement = loaded.placement
    setup = AttentionSetup(
        model=loaded.model.config,
        engine=config,
        dtype=loaded.dtype,
        device=placement.embedding,
        workspace=workspace,
        both_ways=loaded.model.config.bidirectional or (loaded.vision is not None and loaded.vision.both_ways),
        products=_products(loaded.settings, loaded.dtype, is_quantized=loaded.is_quantized),
        key_offsets=(
            key_offsets(loaded.model, loaded.max_model_len)
            if config.cache_type is PagedCacheType.F8E4M3 and isinstance(loaded.model, DecoderModel)
            else ()
        ),
    )
    candidates = (*loaded.backends, *CANDIDATES)
    if placement.is_one_device:
        return choose_storage(setup, candidates)
    storages: dict[torch.device, KvStorage] = {}
    for device in dict.fromkeys(placement.layers):
        _log.info("Layers on %s:", device)
        with working_on(device):
            storages[device] = choose_storage(setup.of_layers(placement.layers_on(device), device), candidates)
    return divided_storage(placement, storages)


def weight_policy(
    checkpoint: Checkpoint,
    settings: BuildSettings,
    environment: Environment,
    dtype: torch.dtype,
    placed: PlacedNames,
    workspace: Workspace | None,
    importance: CheckpointImportance | None,
) -> WeightPolicy:
    """Choose the form that the weights take.

    :param importance: what errors of quantized weights are weighted by
    :raises ConfigError: weights are to be quantized where that is not possible
    """
    isq = settings.isq
    if isq is not None and checkpoint.is_quantized:
        again = "What %s holds quantized is decoded and quantized again, to %s, which does not give back what it lost."
        _log.info(again, checkpoint.path, isq.value)
    if isq is None and environment.isq is not None:
        if checkpoint.is_quantized:
            _log.info("%s = %s leaves %s alone: it is quantized already.", ISQ, environment.isq.value, checkpoint.path)
        else:
            isq = environment.isq
    rules = [] if settings.topology is None else isq_by_name(settings.topology)
    devices, has_library = placed.placement.devices, workspace is not None
    without_blocks = [device for device in devices if _why_no_blocks(device) is not None]
    if isq is not None:
        check_isq(isq, settings, devices, dtype, has_library=has_library)
    for expression, own in rules:
        check_isq(own, settings, placed.devices_of(expression), dtype, has_library=has_library)
    types = [each for each in (isq, *(own for _, own in rules)) if each is not None]
    without = next((each for each in types if has_groups(each)), None)
    if importance is not None and without is not None:
        _log.warning("%s has no use for %s: weights are quantized as without.", without.value, importance.source)
    return WeightPolicy(
        # A dtype that was asked for is the weights' dtype; with "auto" they keep the form they are stored in.
        keep_blocks=settings.dtype == "auto" and len(without_blocks) < len(devices),
        decoded_on=without_blocks,
        workspace=workspace,
        isq=isq,
        isq_by_name=rules,
        importance=None if importance is None else importance.of,
        one_form=settings.batch_invariance,
        memory=LastingMemory(),
    )


def _why_no_blocks(device: torch.device) -> str | None:
    """Say why blocks cannot be multiplied on a device; None: they can."""
    return None if device.type == "cpu" else availability.why_not(device)


def check_isq(
    isq: IsqType, settings: BuildSettings, devices: Iterable[torch.device], dtype: torch.dtype, *, has_library: bool
) -> None:
    """Check that weights can be quantized to a type on some devices.

    :param has_library: whether the native kernels are there
    :raises ConfigError: they cannot
    """
    for device in devices:
        _check_isq_on(device, isq, has_library=has_library)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError.of("dtype", settings.dtype, f"float32, bfloat16 or float16, beside isq = {isq.value}")


def _check_isq_on(device: torch.device, isq: IsqType, *, has_library: bool) -> None:
    if (reason := _why_no_blocks(device)) is not None:
        raise ConfigError.of("isq", isq.value, f"a CPU, or a GPU with Triton's kernels (here {device}: {reason})")
    if device.type != "cpu" and not is_for_gpus(isq):
        allowed = ", ".join(each.value for each in IsqType if is_for_gpus(each))
        raise ConfigError.of("isq", isq.value, f"on {device} one of {allowed}")
    if device.type == "cpu" and not has_library and has_groups(isq):
        allowed = ", ".join(each.value for each in IsqType if not has_groups(each))
        raise ConfigError.of("isq", isq.value, f"without the native kernels one of {allowed}")


def _products(settings: BuildSettings, dtype: torch.dtype, *, is_quantized: bool) -> Products:
    """Choose what attention multiplies: what the model's matrices do."""
    if settings.batch_invariance or dtype is not torch.bfloat16:
        return Products.FLOAT32
    return Products.INT8 if is_quantized else Products.BFLOAT16


def hub_token(source: str) -> str | bool | None:
    """Return the hub token of a token source, as huggingface_hub takes it: None is its cached token, False is none.

    :raises ConfigError: the environment variable is not set, or the file cannot be read
    """
    kind, _, rest = source.partition(":")
    match kind:
        case "cache":
            return None
        case "none":
            return False
        case "literal":
            return rest
        case "env":
            token = read_variable(rest)
            if token is None:
                raise ConfigError.of("with_token_source", source, f"the environment variable {rest} to be set")
            return token
        case _:
            try:
                return read_text(Path(os.path.expanduser(rest))).strip()
            except CheckpointError as error:
                raise ConfigError.of("with_token_source", source, f"a readable file ({error})") from error


def _text_processor(checkpoint: Checkpoint, settings: BuildSettings, vocab_size: int) -> TextProcessor:
    """Make the tokenizer and the chat template, and compare the vocabulary with the model's."""
    tokenizer = settings.tokenizer_json
    if settings.tok_model_id is not None:
        tokenizer = resolve_tokenizer(settings.tok_model_id, token=hub_token(settings.token_source))
    given = {"chat_template": settings.chat_template, "tokenizer_json": tokenizer}
    with collector_paused():
        text = (
            load_text_processor(checkpoint.path, **given)
            if checkpoint.metadata is None
            else text_processor_from_gguf(checkpoint.metadata, **given)
        )
    is_own = checkpoint.metadata is not None and tokenizer is None
    check_vocabulary(text.tokenizer, vocab_size, checkpoint.path, is_own=is_own)
    return text


def fuse(model: AnyModel, backend: AttentionBackend, settings: BuildSettings) -> CausalModel:
    """Fuse the layers of the model where that is possible.

    :raises ConfigError: batch invariance was asked for, and not all weights are packed
    """
    if not isinstance(model, DecoderModel):
        if settings.batch_invariance:
            raise ConfigError.of("with_batch_invariance", True, "a model of a family that has a decoder here")
        return model
    if isinstance(backend, DividedBackend):
        if settings.batch_invariance:
            raise ConfigError.of("with_batch_invariance", True, f"a model on one device; here {model.placement}")
        return _joined_spans(model, backend)
    reason = why_not_fused(model, backend)
    if model.group is not None and model.group.smallest(reason is None) == 0 and reason is None:
        reason = "those of another rank do"
    if settings.batch_invariance and reason is None and model.head.native_weights is None:
        reason = "its output projection has no native kernel"
    if reason is not None:
        if settings.batch_invariance:
            raise ConfigError.of(
                "with_batch_invariance", True, f"a model of packed weights on the native CPU kernels; here {reason}"
            )
        _log.info("Layers run one operation at a time: %s.", reason)
        return model
    return FusedDecoderModel(model, backend, few_rows=FEW_ROWS)


def unfused(model: AnyModel) -> CausalModel:
    """Return what runs a model's layers one operation at a time."""
    if isinstance(model, DecoderModel) and not model.placement.is_one_device:
        return SpannedDecoderModel(model, {})
    return model


def _joined_spans(model: DecoderModel, backend: DividedBackend) -> SpannedDecoderModel:
    """Make what runs a model on several devices; spans of layers on the CPU are fused where that is possible."""
    fused: dict[int, FusedLayers] = {}
    for span in model.placement.spans:
        part, places = backend.part_of(span.layers)
        reason = why_not_fused(model, part, span.layers)
        if reason is None and (pages := part.native_pages) is not None:
            made = FusedLayers(model, pages.of_layers(places), span.layers, few_rows=FEW_ROWS)
            fused[span.layers.start] = made
        elif span.device.type == "cpu":
            layers = f"{span.layers.start}-{span.layers.stop}"
            _log.info("Layers %s run one operation at a time: %s.", layers, reason)
    return SpannedDecoderModel(model, fused)
