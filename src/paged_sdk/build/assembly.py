"""Assembles a ready model from settings and all floors below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve

from paged_sdk.attention.backend import KvStorage
from paged_sdk.attention.choice import Candidate
from paged_sdk.build.adapters import load_adapters, make_bank
from paged_sdk.build.device_setup import alone_on, loading_memory_errors, prepare_thread
from paged_sdk.build.device_steps import make_device_decoding
from paged_sdk.build.draft import config_of_draft, draft_state_bytes, load_draft, make_draft_model
from paged_sdk.build.encoder_memory import encoder_bytes
from paged_sdk.build.encoder_trial import encode_for_trial
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.fusing import fuse, unfused
from paged_sdk.build.kv_memory import make_kv_manager, size_pools
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.layer_drafts import code_beside, make_layer_drafts, make_layers_beside
from paged_sdk.build.loaded_model import LoadedModel, check_division, load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.build.location import encoder_file, model_path
from paged_sdk.build.parts import ModelParts
from paged_sdk.build.placement import choose_devices
from paged_sdk.build.prefix_cache_dir import open_block_files, resolve_prefix_cache_dir
from paged_sdk.build.ranks.child_ranks import ChildRanks
from paged_sdk.build.ranks.followers import Followers
from paged_sdk.build.ranks.launched import LaunchedRanks, follow_launch
from paged_sdk.build.ranks.ranks import (
    RankPlacement,
    check_parts,
    check_ranks,
    place_launched_rank,
    place_ranks,
    refuse_isq,
)
from paged_sdk.build.requantization import WeightRequantizer
from paged_sdk.build.sizing import resolve_engine_config
from paged_sdk.build.stateful import fit_kept_states, with_states
from paged_sdk.build.step_memory import activations_of
from paged_sdk.build.vision import LoadedVision
from paged_sdk.build.weight_form import check_isq
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import Environment, read_launch
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.engine.engine import Engine
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.rendezvous import Rendezvous
from paged_sdk.parallel.shard import shape_of_ranks
from paged_sdk.runner.beside_layers import block_tensors_beside
from paged_sdk.runner.block_content import BlockContent
from paged_sdk.runner.image_queue import ImageQueue
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.stored_blocks import StoredBlocks
from paged_sdk.sampling.processor import Processor
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.speculative.forced_tokens import ForcedTokens
from paged_sdk.speculative.host_drafts import HostDrafts
from paged_sdk.speculative.several_proposers import SeveralProposers
from paged_sdk.speculative.text_proposer import TextProposer
from paged_sdk.system.processors import pin_thread, pinned_thread, usable_processors
from paged_sdk.vision.encoder import EncodedImage

__all__ = ["load_parts"]

_log = get_logger(__name__)


def load_parts(
    source: ModelSource,
    settings: BuildSettings,
    environment: Environment,
    *,
    proposer: Proposer | None = None,
    backends: Iterable[Candidate] = (),
    check_cancelled: Callable[[], None] = lambda: None,
) -> ModelParts:
    """Load a model.

    :param proposer: proposes drafts; None: chosen by the settings
    :param backends: attention backends to try, in order, before those of attention/choice.py
    :param check_cancelled: called before each tensor and between stages; an exception that it raises stops loading
    :raises ConfigError: a setting cannot be used with this model or machine
    :raises ModelLoadError: the model cannot be loaded
    :raises SystemExit: this process was launched as a rank other than 0, and rank 0 has ended
    """
    launch = read_launch() if settings.is_to_be_divided else None
    placements = place_ranks(settings) if launch is None else [place_launched_rank(settings, launch)]
    size = len(placements) if launch is None else launch.size
    settings = placements[0].of(settings)
    devices = choose_devices(settings)
    if settings.draft is not None:
        devices += choose_devices(settings.draft.settings, devices[0])
    check_ranks(settings, size, devices)
    rendezvous = None if launch is None else Rendezvous(launch, check_cancelled)
    with nullcontext() if rendezvous is None else rendezvous.failing():
        path = model_path(source, settings)
        encoder = encoder_file(source, settings, path)
        check_cancelled()
        backends = tuple(backends)
        if size > 1:
            encoder = check_parts(size, devices[0], encoder, backends)
        loading = Loading(
            path=path,
            settings=settings,
            environment=environment,
            devices=devices,
            check_cancelled=check_cancelled,
            encoder=encoder,
            backends=backends,
        )
        parts = _load_ranks(loading, placements, rendezvous, proposer)
    if parts is None:
        raise SystemExit(0)
    return parts


def _load_ranks(
    loading: Loading, placements: Sequence[RankPlacement], rendezvous: Rendezvous | None, proposer: Proposer | None
) -> ModelParts | None:
    """Load a model or, with several ranks, this rank's shard.

    :param placements: where this process and the ranks that it starts compute
    :param rendezvous: connects ranks that were launched separately; None: this process starts any other ranks
    :returns: None on ranks other than 0, after rank 0 has ended
    """
    followers: Followers | None = None
    try:
        with alone_on(*loading.devices), loading_memory_errors(loading.path), pinned_thread(placements[0].processors):
            loading = evolve(loading, workspace=_workspace(loading.devices, loading.settings))
            if rendezvous is not None and rendezvous.launch.rank > 0:
                follow_launch(rendezvous, loading)
                rendezvous.close()
                return None
            if rendezvous is not None:
                followers = Followers(LaunchedRanks(rendezvous, loading))
            elif len(placements) > 1:
                check_division(loading, len(placements))  # before starting processes, which takes seconds
                followers = Followers(ChildRanks(loading, placements))
            parts = _load(loading, followers, placements[0], proposer)
    except BaseException as error:
        if followers is not None:
            followers.close(error)
        raise
    return_free_memory()
    return parts


def _load(
    loading: Loading, followers: Followers | None, rank_placement: RankPlacement, proposer: Proposer | None
) -> ModelParts:
    """Load this process's model or shard, and assemble its engine.

    :param followers: the other ranks; None: this process holds the whole model
    """
    group = None if followers is None else followers.group
    if followers is not None:
        loading = evolve(loading, check_cancelled=followers.watched(loading.check_cancelled))
    loaded = load_weights(loading, group=group)
    draft = load_draft(loaded, loading)
    model, settings, placement = loaded.model, loading.settings, loaded.placement
    config = resolve_engine_config(
        model.config,
        settings,
        loading.environment,
        devices=placement.devices,
        max_model_len=loaded.max_model_len,
        has_mtp=loaded.mtp is not None,
    )
    config = resolve_prefix_cache_dir(
        config,
        settings,
        loading.environment,
        is_bidirectional=model.config.bidirectional,
        has_states=bool(model.config.recurrent_layers),
        is_divided=group is not None,
    )
    is_beside = draft is not None and draft.placement.embedding == placement.embedding
    config = fit_kept_states(
        config,
        model.config,
        loaded.dtype,
        device=placement.embedding,
        beside=0 if draft is None or not is_beside else draft_state_bytes(draft, config),
    )
    open_files = partial(
        open_block_files,
        config=config,
        environment=loading.environment,
        more_files=() if loading.encoder is None else (loading.encoder.path,),
    )
    if followers is not None:
        followers.join(loading.check_cancelled)
    storage = make_storage(loaded, config, loading.workspace, loading.check_cancelled)  # may run the model
    loading.check_cancelled()
    processors = default_processors(
        model.config.vocab_size,
        partial(loaded.text.tokenizer.encode, add_special_tokens=False),
        prepare_all_masks=placement.head.type != "cpu",
    )
    config = _with_pool(config, loaded, draft, storage, processors, group)
    kv, backend = make_kv_manager(config, model.config), storage.make(config.num_blocks)
    if config.paged:
        pool = config.num_blocks, config.block_size, backend.num_bytes / 2**20, config.cache_type.value
        _log.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s).", *pool)
    loading.check_cancelled()
    fused = fuse(model, backend, settings)
    bank = make_bank(loaded, fused)
    adapters = load_adapters(bank, settings, loading.check_cancelled)
    on_devices = group is not None and group.is_on_devices
    make_decoding = partial(
        make_device_decoding,
        config=config,
        processors=processors,
        vocab_size=model.config.vocab_size,
        placement=placement,
        visible=settings.logging,
        # Slots make recorded steps slower even without adapters, so only models with adapters get them.
        make_slots=bank.make_slots if adapters and not on_devices else None,
        group=group if on_devices else None,
    )
    queue, images = _images(loaded, config)
    assistant = draft if draft is not None and draft.assistant is not None else None
    make_beside = partial(make_layers_beside, assistant=assistant, config=config, workspace=loading.workspace)
    beside = make_beside(loaded, fused, backend)
    files = open_files(loaded, code_beside(backend, beside))
    blocks = None if files is None else StoredBlocks(files, BlockContent(block_tensors_beside(backend, beside)))
    scheduler = Scheduler(config, kv, queue, blocks)
    drafts = make_layer_drafts(beside, loaded, config, scheduler)
    runner = ModelRunner(
        fused,
        backend,
        Sampler(model.config.vocab_size, placement.head, processors),
        make_decoding(fused, backend),
        WeightRequantizer(
            loaded,
            loading.environment,
            config,
            workspace=loading.workspace,
            make_device_decoding=make_decoding,
            open_block_files=open_files,
            make_beside=make_beside,
        ),
        adapters=bank,
        images=images,
        others=followers,
        blocks=blocks,
        drafts=drafts,
    )
    _log.info(
        "%s: %s, %s on %s, context %d tokens",
        loading.path.name,
        model.config.model_type,
        loaded.dtype,
        placement,
        config.max_model_len,
    )
    if proposer is None:
        proposer = _proposer(loaded, draft, drafts, config, scheduler, loading.workspace)
    if runner.samples_on_device and proposer is not None:
        proposer = HostDrafts(proposer, runner.num_on_host)
    return ModelParts(
        name=loading.path.stem if loading.path.is_file() else loading.path.name,
        model_type=loaded.model_type,
        architecture=model.config.model_type,
        engine=Engine(scheduler, kv, runner, loaded.text.tokenizer, proposer=proposer, images=queue, blocks=blocks),
        text=loaded.text,
        config=config,
        vocab_size=model.config.vocab_size,
        max_sequence_tokens=kv.max_sequence_tokens,
        hidden_size=model.config.hidden_size,
        recipe=loaded.recipe,
        why_no_text=loaded.why_no_text,
        is_bidirectional=model.config.bidirectional,
        heals_tokens=settings.token_healing,
        images=None if loaded.vision is None else loaded.vision.prompts,
        on_worker_start=partial(
            _start_worker, placement.head, settings, loading.workspace, (images, blocks), rank_placement
        ),
        check_isq=refuse_isq
        if on_devices
        else partial(
            check_isq,
            settings=settings,
            devices=placement.devices,
            dtype=loaded.dtype,
            has_library=loading.workspace is not None,
        ),
        log_throughput=settings.throughput_logging,
        bank=bank,
        adapters=adapters,
    )


def _with_pool(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    storage: KvStorage,
    processors: Sequence[Processor[Any]],
    group: Group | None,
) -> EngineConfig:
    """Decide the size of the KV pool: on GPUs by agreement of all ranks, on the CPU by rank 0 for all."""
    on_devices = group if group is not None and group.is_on_devices else None
    activations = activations_of(
        unfused(loaded.model),
        storage,
        config,
        processors=processors,
        vocab_size=loaded.model.config.vocab_size,
        placement=loaded.placement,
        group=on_devices,
    )
    device = loaded.placement.embedding
    if loaded.vision is not None and device in activations:
        activations[device] += encoder_bytes(
            device,
            loaded.vision,
            loaded.settings.images or ImageLimits(),
            max_tokens=config.max_model_len,
            reserved=activations[device],
        )
    placed = [(loaded.model.config, loaded.placement)]
    if draft is not None and draft.assistant is None:
        placed.append((draft.model.config, draft.placement))
    if loaded.mtp is not None:
        placed.append((loaded.mtp.config, Placement.on(device, 1)))
    if group is not None and on_devices is None:  # the pools of all ranks share this machine's memory
        placed[0] = (shape_of_ranks(loaded.shape, group.size), loaded.placement)
    activations = with_states(activations, loaded.model.config, config, loaded.dtype, device=device)
    if draft is not None:
        own = config_of_draft(draft, config)
        activations = with_states(activations, draft.model.config, own, draft.dtype, device=draft.placement.embedding)
    config = size_pools(config, placed, dtype=loaded.dtype, activations=activations)
    if on_devices is not None:
        config = evolve(config, num_blocks=on_devices.smallest(config.num_blocks))
    elif group is not None:
        group.send_message((config.num_blocks,))
    return config


def _proposer(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    layers: LayerDrafts[Any, Any] | None,
    config: EngineConfig,
    scheduler: Scheduler,
    workspace: Workspace | None,
) -> Proposer:
    """Make the proposer of drafts: forced tokens and texts, and layers or a model that drafts, if there are any."""
    has_states = bool(loaded.model.config.recurrent_layers)
    most = config.drafts_per_state if has_states else config.gamma or SpeculativeConfig().gamma
    proposer = ForcedTokens(_text_proposer(config, scheduler, most))
    if layers is not None:
        return SeveralProposers((proposer, layers))
    if draft is None:
        return proposer
    own = make_draft_model(
        draft,
        config,
        target_vocab_size=loaded.model.config.vocab_size,
        times=scheduler.costs.times,
        balance=scheduler.costs.drafts.open_balance(),
        workspace=workspace,
    )
    return SeveralProposers((proposer, own))


def _text_proposer(config: EngineConfig, scheduler: Scheduler, most: int) -> TextProposer:
    """Make the proposer of drafts from texts: from predictions, and from earlier text if speculation is on.

    :param most: maximum number of drafts of a sequence
    """
    return TextProposer(
        most,
        looks_back=config.gamma > 0,
        shares_texts=config.prefix_cache_n > 0,
        times=scheduler.costs.times,
        balance=scheduler.costs.drafts.open_balance(),
    )


def _images(
    loaded: LoadedModel, config: EngineConfig
) -> tuple[ImageQueue[EncodedImage], ImageVectors] | tuple[None, None]:
    """Make the queue and the encoding thread of images, if the model accepts images."""
    if loaded.vision is None:
        return None, None
    shape, num_threads = loaded.model.config, loaded.settings.num_threads or usable_processors()
    queue = ImageQueue[EncodedImage](
        shape.hidden_size * (1 + shape.num_image_layers) * loaded.dtype.itemsize, max_slowdown=config.max_slowdown
    )
    # The other half of the threads stays with the steps.
    on_start = partial(_start_encoding, loaded.placement.embedding, max(num_threads // 2, 1), loaded.vision)
    return queue, ImageVectors(loaded.vision.encoder, queue, on_start=on_start)


def _start_encoding(device: torch.device, num_threads: int, vision: LoadedVision) -> None:
    prepare_thread(device, num_threads)
    if device.type == "cuda":
        encode_for_trial(vision)


def _start_worker(
    device: torch.device,
    settings: BuildSettings,
    workspace: Workspace | None,
    beside: Iterable[ImageVectors | StoredBlocks | None],
    rank_placement: RankPlacement,
) -> None:
    pin_thread(rank_placement.processors)
    # torch's threads would compete with those of the native kernels for the CPUs.
    prepare_thread(device, settings.num_threads if workspace is None else 1)
    for each in beside:
        if each is not None:
            each.start()


def _workspace(devices: Iterable[torch.device], settings: BuildSettings) -> Workspace | None:
    """Make the scratch memory of the native CPU kernels; None if no device is a CPU or the kernels are unavailable."""
    library = load() if any(device.type == "cpu" for device in devices) else None
    if library is None:
        return None
    threads, processors = settings.num_threads, usable_processors()
    if threads is not None and threads > processors:
        _log.info("%d threads compute instead of %d: this process may use no more processors", processors, threads)
        threads = processors
    return Workspace(library, num_threads=threads)
