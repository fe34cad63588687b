"""Builds a model that is ready to run from settings; all parts are put together here."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup
from paged_sdk.attention.choice import choose_storage
from paged_sdk.build.collector import collector_paused
from paged_sdk.build.device_setup import (
    activations_of,
    alone_on,
    make_device_decoding,
    memory_must_do,
    prepare_thread,
    weights_must_fit,
)
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.kv_memory import make_kv_manager, size_pool
from paged_sdk.build.parts import ModelParts
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.sizing import resolve_engine_config, resolve_max_model_len
from paged_sdk.build.vocabulary import check_vocabulary
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import ISQ, Environment, read_variable
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.engine.engine import Engine
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.files import read_text
from paged_sdk.kernels.attention_inputs import Products
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.own_pages import LastingMemory
from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import read_config
from paged_sdk.models.fused_decoder import FusedDecoderModel, why_not_fused
from paged_sdk.models.key_offsets import key_offsets
from paged_sdk.models.loading import load_model
from paged_sdk.processors import usable_processors
from paged_sdk.quant.native_block import FEW_ROWS
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.runner.device import choose_device, choose_dtype
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.speculative.text_proposer import TextProposer
from paged_sdk.threads import thread_must_start
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint
from paged_sdk.weights.hub import resolve_model

__all__ = ["load_parts"]

_log = get_logger(__name__)


def load_parts(
    source: ModelSource,
    settings: BuildSettings,
    environment: Environment,
    *,
    proposer: Proposer | None = None,
    go_on: Callable[[], None] = lambda: None,
) -> ModelParts:
    """Load a model.

    :param proposer: guesses tokens for the model to verify; None: who does follows from the settings
    :param go_on: called before each tensor and each further step; what it raises ends the loading
    :raises ConfigError: a setting cannot be used with this model or machine
    :raises ModelLoadError: the model cannot be loaded
    """
    device = choose_device(settings.device)
    path = resolve_model(
        source.location,
        filenames=source.filenames,
        revision=settings.revision,
        token=_token(settings.token_source),
        gguf=source.gguf,
    )
    go_on()
    with alone_on(device), memory_must_do(path):
        parts = _load(path, settings, environment, device, proposer, go_on)
    return_free_memory()
    return parts


def _load(
    path: Path,
    settings: BuildSettings,
    environment: Environment,
    device: torch.device,
    proposer: Proposer | None,
    go_on: Callable[[], None],
) -> ModelParts:
    dtype = choose_dtype(settings.dtype, device)
    checkpoint = open_checkpoint(path)
    workspace = _workspace(device, settings)
    try:
        shape = read_config(checkpoint.config)
        max_model_len = resolve_max_model_len(settings, shape)
        policy = _policy(checkpoint, settings, environment, dtype, device, workspace)
        with (
            ThreadPoolExecutor(1, thread_name_prefix="paged-sdk tokenizer") as beside,
            weights_must_fit(path, device),
            LoadingBar(f"Loading {path.name}", visible=settings.logging) as bar,
        ):
            with thread_must_start("to make a tokenizer in"):
                text_beside = beside.submit(_text_processor, checkpoint, settings, shape.vocab_size)

            def progress(done: int, total: int) -> None:
                go_on()
                if text_beside.done():
                    text_beside.result()  # whose error ends the loading
                bar.update(done, total)

            try:
                model = load_model(
                    checkpoint.config,
                    checkpoint.source,
                    dtype=dtype,
                    device=device,
                    policy=policy,
                    on_progress=progress,
                    num_threads=1 if workspace is None else workspace.num_threads,
                )
            finally:
                text = text_beside.result()  # an error of the tokenizer goes before one of the weights
    finally:
        checkpoint.source.close()
    go_on()
    config = resolve_engine_config(model.config, settings, environment, device=device, max_model_len=max_model_len)
    storage = choose_storage(
        AttentionSetup(
            model=model.config,
            engine=config,
            dtype=dtype,
            device=device,
            workspace=workspace,
            products=_products(settings, dtype, is_quantized=policy.makes_quantized(checkpoint.is_quantized)),
            key_offsets=key_offsets(model, max_model_len) if config.cache_type is PagedCacheType.F8E4M3 else (),
        )
    )
    go_on()
    vocab_size = model.config.vocab_size
    processors = default_processors(vocab_size, partial(text.tokenizer.encode, add_special_tokens=False))
    activations = activations_of(model, storage, config, processors=processors, vocab_size=vocab_size, device=device)
    config = size_pool(config, model.config, dtype=dtype, device=device, activations=activations)
    kv, backend = make_kv_manager(config), storage.make(config.num_blocks)
    if config.paged:
        pool = config.num_blocks, config.block_size, backend.num_bytes / 2**20, config.cache_type.value
        _log.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s).", *pool)
    go_on()
    fused = _fused(model, backend, settings)
    runner = ModelRunner(
        fused,
        backend,
        Sampler(vocab_size, device, processors),
        make_device_decoding(
            fused, backend, config, processors=processors, vocab_size=vocab_size, visible=settings.logging
        ),
    )
    _log.info(
        "%s: %s, %s on %s, context %d tokens", path.name, model.config.model_type, dtype, device, config.max_model_len
    )
    scheduler = Scheduler(config, kv)
    return ModelParts(
        name=path.stem if path.is_file() else path.name,
        architecture=model.config.model_type,
        engine=Engine(scheduler, kv, runner, text.tokenizer, proposer=proposer or _proposer(config, scheduler)),
        text=text,
        config=config,
        vocab_size=vocab_size,
        # The last token of a sequence takes a position of the context, but needs no KV.
        max_prompt_tokens=min(config.max_model_len - 1, kv.max_sequence_tokens),
        heals_tokens=settings.token_healing,
        # The native kernels have threads of their own, in whose way torch's would be.
        on_worker_start=partial(prepare_thread, device, settings.num_threads if workspace is None else 1),
        log_throughput=settings.throughput_logging,
    )


def _proposer(config: EngineConfig, scheduler: Scheduler) -> Proposer:
    """Make who proposes drafts: of predicted texts at least."""
    return TextProposer(
        config.gamma or SpeculativeConfig().gamma,
        looks_back=config.gamma > 0,
        shares_texts=config.prefix_cache_n > 0,
        times=scheduler.times,
        account=scheduler.drafts,
    )


def _workspace(device: torch.device, settings: BuildSettings) -> Workspace | None:
    """Make the scratch memory of the native CPU kernels. Return None where they are absent, and log why."""
    library = load() if device.type == "cpu" else None
    if library is None:
        return None
    threads, processors = settings.num_threads, usable_processors()
    if threads is not None and threads > processors:
        _log.info("%d threads compute instead of %d: this process may use no more processors", processors, threads)
        threads = processors
    return Workspace(library, num_threads=threads)


def _policy(
    checkpoint: Checkpoint,
    settings: BuildSettings,
    environment: Environment,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace | None,
) -> WeightPolicy:
    """Choose the form that the weights take.

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
    reason = None if device.type == "cpu" else availability.why_not(device)  # why blocks cannot be multiplied there
    if isq is not None and reason is not None:
        raise ConfigError.of("isq", isq.value, f"a CPU, or a GPU with Triton's kernels (here {device}: {reason})")
    if isq is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError.of("dtype", settings.dtype, f"float32, bfloat16 or float16, beside isq = {isq.value}")
    return WeightPolicy(
        # A dtype that was asked for is the weights' dtype; with "auto" they keep the form they are stored in.
        keep_blocks=settings.dtype == "auto" and reason is None,
        workspace=workspace,
        isq=isq,
        one_form=settings.batch_invariance,
        memory=LastingMemory(),
    )


def _products(settings: BuildSettings, dtype: torch.dtype, *, is_quantized: bool) -> Products:
    """Choose what attention multiplies: what the model's matrices do."""
    if settings.batch_invariance or dtype is not torch.bfloat16:
        return Products.FLOAT32
    return Products.INT8 if is_quantized else Products.BFLOAT16


def _fused(model: DecoderModel, backend: AttentionBackend, settings: BuildSettings) -> CausalModel:
    """Fuse the layers of the model where that is possible.

    :raises ConfigError: batch invariance was asked for, and not all weights are packed
    """
    reason = why_not_fused(model, backend)
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


def _token(source: str) -> str | bool | None:
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
    given = {"chat_template": settings.chat_template, "tokenizer_json": settings.tokenizer_json}
    with collector_paused():
        text = (
            load_text_processor(checkpoint.path, **given)
            if checkpoint.metadata is None
            else text_processor_from_gguf(checkpoint.metadata, **given)
        )
    is_own = checkpoint.metadata is not None and settings.tokenizer_json is None
    check_vocabulary(text.tokenizer, vocab_size, checkpoint.path, is_own=is_own)
    return text
