"""Builds a model that is ready to run from settings; all parts are put together here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from attrs import evolve

from paged_sdk.attention.choice import Candidate
from paged_sdk.build.adapters import load_adapters, make_bank
from paged_sdk.build.child_ranks import ChildRanks
from paged_sdk.build.device_setup import alone_on, memory_must_do, prepare_thread
from paged_sdk.build.device_steps import make_device_decoding
from paged_sdk.build.draft import load_draft, make_draft_model
from paged_sdk.build.encoder_file import EncoderFile
from paged_sdk.build.encoder_trial import encode_for_trial
from paged_sdk.build.followers import Followers
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.fusing import fuse, unfused
from paged_sdk.build.kv_memory import make_kv_manager, size_pools
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.launched import LaunchedRanks, follow_launch
from paged_sdk.build.loaded_model import LoadedModel, check_division, load_weights
from paged_sdk.build.location import encoder_file, model_path
from paged_sdk.build.parts import ModelParts
from paged_sdk.build.placement import choose_devices
from paged_sdk.build.ranks import Seat, check_parts, check_ranks, choose_seats, launched_seat, refuse_isq
from paged_sdk.build.requantization import WeightRequantizer
from paged_sdk.build.sizing import resolve_engine_config
from paged_sdk.build.step_memory import activations_of
from paged_sdk.build.vision import LoadedVision
from paged_sdk.build.weight_form import check_isq
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import Environment, read_launch
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.engine.engine import Engine
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.logs import get_logger
from paged_sdk.parallel.meeting import Meeting
from paged_sdk.parallel.shard import shape_of_ranks
from paged_sdk.processors import keep_on, kept_on, usable_processors
from paged_sdk.runner.image_queue import ImageQueue
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.speculative.forced_tokens import ForcedTokens
from paged_sdk.speculative.several_proposers import SeveralProposers
from paged_sdk.speculative.text_proposer import TextProposer
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
    go_on: Callable[[], None] = lambda: None,
) -> ModelParts:
    """Load a model.

    :param proposer: guesses tokens for the model to verify; None: who does follows from the settings
    :param backends: what may keep keys and values before those that there are, the first of them first
    :param go_on: called before each tensor and each further step; what it raises ends the loading
    :raises ConfigError: a setting cannot be used with this model or machine
    :raises ModelLoadError: the model cannot be loaded
    :raises SystemExit: this process was started as another rank than the first, and has been one to the end
    """
    launch = read_launch() if settings.is_to_be_divided else None
    seats = choose_seats(settings) if launch is None else [launched_seat(settings, launch)]
    size = len(seats) if launch is None else launch.size
    settings = seats[0].of(settings)
    devices = choose_devices(settings)
    if settings.draft is not None:
        devices += choose_devices(settings.draft.settings, devices[0])
    check_ranks(settings, size, devices)
    meeting = None if launch is None else Meeting(launch, go_on)
    with nullcontext() if meeting is None else meeting.failing():
        parts = _load_ranks(source, settings, environment, devices, seats, meeting, proposer, tuple(backends), go_on)
    if parts is None:
        raise SystemExit(0)
    return parts


def _load_ranks(
    source: ModelSource,
    settings: BuildSettings,
    environment: Environment,
    devices: tuple[torch.device, ...],
    seats: Sequence[Seat],
    meeting: Meeting | None,
    proposer: Proposer | None,
    backends: tuple[Candidate, ...],
    go_on: Callable[[], None],
) -> ModelParts | None:
    """Load a model, or what this rank has of it.

    :param seats: where the ranks compute that this process is to start, itself among them
    :param meeting: of ranks that were started one by one; None: this process starts the others, if there are any
    :returns: None on other ranks than the first, once that has ended
    """
    size = len(seats) if meeting is None else meeting.launch.size
    path = model_path(source, settings)
    encoder = encoder_file(source, settings, path)
    go_on()
    followers: Followers | None = None
    if size > 1:
        encoder = check_parts(size, devices[0], encoder, backends)
    try:
        with alone_on(*devices), memory_must_do(path), kept_on(seats[0].processors):
            if meeting is not None and meeting.launch.rank > 0:
                workspace = _workspace(devices, settings)
                follow_launch(meeting, path, settings, environment, devices, workspace, go_on)
                meeting.close()
                return None
            if meeting is not None:
                followers = Followers(LaunchedRanks(meeting, path, settings, environment, devices, go_on))
            elif size > 1:
                check_division(path, settings, devices[0], size)  # each process takes seconds to start
                followers = Followers(ChildRanks(path, settings, environment, seats=seats, device=devices[0]))
            parts = _load(path, encoder, settings, environment, devices, proposer, backends, go_on, followers, seats[0])
    except BaseException as error:
        if followers is not None:
            followers.close(error)
        raise
    return_free_memory()
    return parts


def _load(
    path: Path,
    encoder: EncoderFile | None,
    settings: BuildSettings,
    environment: Environment,
    devices: tuple[torch.device, ...],
    proposer: Proposer | None,
    backends: tuple[Candidate, ...],
    go_on: Callable[[], None],
    followers: Followers | None,
    seat: Seat,
) -> ModelParts:
    workspace = _workspace(devices, settings)
    group = None
    if followers is not None:
        group, go_on = followers.group, followers.watched(go_on)
    loaded = load_weights(path, settings, environment, devices[0], workspace, go_on, encoder, group=group)
    loaded = evolve(loaded, backends=backends)
    model, text, placement = loaded.model, loaded.text, loaded.placement
    draft = load_draft(loaded, environment, devices[0], workspace, go_on)
    config = resolve_engine_config(
        model.config, settings, environment, devices=placement.devices, max_model_len=loaded.max_model_len
    )
    storage = make_storage(loaded, config, workspace)
    if followers is not None:
        followers.join(go_on)
    go_on()
    vocab_size = model.config.vocab_size
    processors = default_processors(
        vocab_size, partial(text.tokenizer.encode, add_special_tokens=False), ahead=placement.head.type != "cpu"
    )
    on_devices = None if followers is None or not followers.group.is_on_devices else followers.group
    activations = activations_of(
        unfused(model),
        storage,
        config,
        processors=processors,
        vocab_size=vocab_size,
        placement=placement,
        group=on_devices,
    )
    placed = [(each.model.config, each.placement) for each in (loaded, draft) if each is not None]
    if followers is not None and on_devices is None:  # all ranks have their pools in the memory of this machine
        placed[0] = (shape_of_ranks(loaded.shape, followers.group.size), loaded.placement)
    config = size_pools(config, placed, dtype=loaded.dtype, activations=activations)
    if on_devices is not None:
        config = evolve(config, num_blocks=on_devices.smallest(config.num_blocks))
    elif followers is not None:
        followers.group.tell((config.num_blocks,))
    kv, backend = make_kv_manager(config), storage.make(config.num_blocks)
    if config.paged:
        pool = config.num_blocks, config.block_size, backend.num_bytes / 2**20, config.cache_type.value
        _log.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s).", *pool)
    go_on()
    fused = fuse(model, backend, settings)
    bank = make_bank(loaded, fused)
    adapters = load_adapters(bank, settings, go_on)
    make_decoding = partial(
        make_device_decoding,
        config=config,
        processors=processors,
        vocab_size=vocab_size,
        placement=placement,
        visible=settings.logging,
        # What steps without adapters would take longer is for models that have some.
        make_slots=bank.make_slots if adapters and on_devices is None else None,
        group=on_devices,
    )
    queue, images = _images(loaded, config, settings)
    runner = ModelRunner(
        fused,
        backend,
        Sampler(vocab_size, placement.head, processors),
        make_decoding(fused, backend),
        WeightRequantizer(loaded, environment, config, workspace=workspace, make_device_decoding=make_decoding),
        adapters=bank,
        images=images,
        others=followers,
    )
    _log.info(
        "%s: %s, %s on %s, context %d tokens",
        path.name,
        model.config.model_type,
        loaded.dtype,
        placement,
        config.max_model_len,
    )
    scheduler = Scheduler(config, kv, queue)
    if proposer is None:
        proposer = ForcedTokens(_proposer(config, scheduler))
        if draft is not None:
            own = make_draft_model(
                draft,
                config,
                target_vocab_size=vocab_size,
                times=scheduler.times,
                balance=scheduler.drafts.open_balance(),
                workspace=workspace,
            )
            proposer = SeveralProposers((proposer, own))
    return ModelParts(
        name=path.stem if path.is_file() else path.name,
        architecture=model.config.model_type,
        engine=Engine(scheduler, kv, runner, text.tokenizer, proposer=proposer, images=queue),
        text=text,
        config=config,
        vocab_size=vocab_size,
        # The last token of a sequence takes a position of the context, but needs no KV.
        max_prompt_tokens=min(config.max_model_len - 1, kv.max_sequence_tokens),
        hidden_size=model.config.hidden_size,
        recipe=loaded.recipe,
        why_no_text=loaded.why_no_text,
        reads_whole_texts=model.config.bidirectional,
        heals_tokens=settings.token_healing,
        images=None if loaded.vision is None else loaded.vision.prompts,
        on_worker_start=partial(_start_worker, placement.head, settings, workspace, images, seat),
        check_isq=refuse_isq
        if group is not None and group.is_on_devices
        else partial(
            check_isq,
            settings=settings,
            devices=placement.devices,
            dtype=loaded.dtype,
            has_library=workspace is not None,
        ),
        log_throughput=settings.throughput_logging,
        bank=bank,
        adapters=adapters,
    )


def _proposer(config: EngineConfig, scheduler: Scheduler) -> TextProposer:
    """Make who proposes drafts: of predicted texts at least."""
    return TextProposer(
        config.gamma or SpeculativeConfig().gamma,
        looks_back=config.gamma > 0,
        shares_texts=config.prefix_cache_n > 0,
        times=scheduler.times,
        balance=scheduler.drafts.open_balance(),
    )


def _images(
    loaded: LoadedModel,
    config: EngineConfig,
    settings: BuildSettings,
) -> tuple[ImageQueue[EncodedImage], ImageVectors] | tuple[None, None]:
    """Make what encodes the images of prompts, if the model takes any."""
    if loaded.vision is None:
        return None, None
    shape, num_threads = loaded.model.config, settings.num_threads or usable_processors()
    queue = ImageQueue[EncodedImage](
        shape.hidden_size * (1 + shape.num_image_layers) * loaded.dtype.itemsize, max_slowdown=config.max_slowdown
    )
    # Texts that are being generated keep the other half.
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
    images: ImageVectors | None,
    seat: Seat,
) -> None:
    keep_on(seat.processors)
    # The native kernels have threads of their own, in whose way torch's would be.
    prepare_thread(device, settings.num_threads if workspace is None else 1)
    if images is not None:
        images.start()


def _workspace(devices: Iterable[torch.device], settings: BuildSettings) -> Workspace | None:
    """Make the scratch memory of the native CPU kernels. Return None where they are absent, and log why."""
    library = load() if any(device.type == "cpu" for device in devices) else None
    if library is None:
        return None
    threads, processors = settings.num_threads, usable_processors()
    if threads is not None and threads > processors:
        _log.info("%d threads compute instead of %d: this process may use no more processors", processors, threads)
        threads = processors
    return Workspace(library, num_threads=threads)
