"""From settings to a model that is ready to run: the one place where everything is put together."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import PAGED_ATTN, Environment, read_variable
from paged_sdk.config.paged import PagedAttentionMeta, PagedCacheType
from paged_sdk.engine.engine import Engine
from paged_sdk.errors import ConfigError
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.kv.pool_size import DEFAULT_CUDA_MEMORY, BlockLayout, auto_cpu_blocks, blocks_for, fp8_scale_bytes
from paged_sdk.logs import get_logger
from paged_sdk.model import ModelParts
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model
from paged_sdk.preparation import RequestPreparer
from paged_sdk.progress import LoadingBar
from paged_sdk.runner.device import choose_device, choose_dtype, device_memory
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.sampler import Sampler
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint
from paged_sdk.weights.hub import resolve_model

__all__ = ["load_parts"]

_log = get_logger(__name__)

DEFAULT_PREFIX_CACHE_N = 16
DEFAULT_BATCHED_TOKENS = {"cpu": 512}
"""A CPU computes 512 prompt tokens of a small model in about a quarter of a second: texts beside them keep flowing."""
DEFAULT_BATCHED_TOKENS_ELSEWHERE = 2048
PAGED_BY_DEFAULT = frozenset({"cpu", "cuda"})


def load_parts(source: ModelSource, settings: BuildSettings, environment: Environment) -> ModelParts:
    """Load a model.

    :raises ConfigError: a setting that cannot be used with this model or machine
    :raises ModelLoadError: a model that cannot be loaded
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    path = resolve_model(
        source.location,
        filenames=source.filenames,
        revision=settings.revision,
        token=_token(settings.token_source),
        gguf=source.gguf,
    )
    checkpoint = open_checkpoint(path)
    try:
        max_model_len = _max_model_len(settings, read_config(checkpoint.config))
        text = _text_processor(checkpoint, settings)
        with LoadingBar(f"Loading {path.name}", visible=settings.logging) as bar:
            model = load_model(checkpoint.config, checkpoint.source, dtype=dtype, device=device, on_progress=bar.update)
    finally:
        checkpoint.source.close()
    config = _engine_config(
        model.config, settings, environment, dtype=dtype, device=device, max_model_len=max_model_len
    )
    kv, backend = _kv_memory(config, model.config, dtype=dtype, device=device)
    encode = partial(text.tokenizer.encode, add_special_tokens=False)
    runner = ModelRunner(model, backend, Sampler(model.config.vocab_size, device, encode))
    _log.info(
        "%s: %s, %s on %s, context %d tokens", path.name, model.config.model_type, dtype, device, config.max_model_len
    )
    return ModelParts(
        name=path.stem if path.is_file() else path.name,
        architecture=model.config.model_type,
        engine=Engine(Scheduler(config, kv), kv, runner, text.tokenizer),
        preparer=RequestPreparer(
            text=text,
            config=config,
            vocab_size=model.config.vocab_size,
            # The last token of a sequence needs a place in the context, but no KV.
            max_prompt_tokens=min(config.max_model_len - 1, kv.max_sequence_tokens),
        ),
        on_worker_start=None if settings.num_threads is None else partial(torch.set_num_threads, settings.num_threads),
        log_throughput=settings.throughput_logging,
    )


def _token(source: str) -> str | bool | None:
    """The hub token that a token source stands for, as huggingface_hub takes it: None is its cache, False none.

    :raises ConfigError: a variable that is not set, or a file that cannot be read
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
                return Path(rest).expanduser().read_text().strip()
            except OSError as error:
                raise ConfigError.of("with_token_source", source, f"a readable file ({error.strerror})") from error


def _text_processor(checkpoint: Checkpoint, settings: BuildSettings) -> TextProcessor:
    if checkpoint.metadata is not None:
        return text_processor_from_gguf(
            checkpoint.metadata, chat_template=settings.chat_template, tokenizer_json=settings.tokenizer_json
        )
    return load_text_processor(
        checkpoint.path, chat_template=settings.chat_template, tokenizer_json=settings.tokenizer_json
    )


def _max_model_len(settings: BuildSettings, model: DecoderConfig) -> int:
    asked = settings.max_model_len or model.max_position
    if asked > model.max_position:
        raise ConfigError.of("max_model_len", asked, f"at most the model's context of {model.max_position}")
    return asked


def _engine_config(
    model: DecoderConfig,
    settings: BuildSettings,
    environment: Environment,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> EngineConfig:
    """Fill in what was left open: builder first, then environment, then what suits model and machine."""
    prefix_cache_n = next(
        n for n in (settings.prefix_cache_n, environment.prefix_cache_n, DEFAULT_PREFIX_CACHE_N) if n is not None
    )
    meta = _paged_meta(settings, environment, device)
    return EngineConfig(
        paged=meta is not None,
        num_blocks=0
        if meta is None
        else _num_blocks(
            meta, model, dtype=dtype, device=device, max_num_seqs=settings.max_num_seqs, max_model_len=max_model_len
        ),
        block_size=PagedAttentionMeta().block_size if meta is None else meta.block_size,
        cache_type=PagedCacheType.AUTO if meta is None else meta.cache_type,
        prefix_cache_n=prefix_cache_n,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens
        or DEFAULT_BATCHED_TOKENS.get(device.type, DEFAULT_BATCHED_TOKENS_ELSEWHERE),
        max_model_len=max_model_len,
        max_queue=settings.max_queue,
        sliding_window=model.window,
    )


def _paged_meta(settings: BuildSettings, environment: Environment, device: torch.device) -> PagedAttentionMeta | None:
    """The settings of the pool, or None for contiguous KV."""
    asked = settings.paged_attn if settings.paged_attn is not None else environment.paged_attn
    if asked is None and device.type not in PAGED_BY_DEFAULT:
        _log.info("paged attention is off by default on %s; %s=on or with_paged_attn() turn it on", device, PAGED_ATTN)
        return None
    if asked is False:
        return None
    return settings.paged_meta or environment.paged_meta or PagedAttentionMeta()


def _num_blocks(
    meta: PagedAttentionMeta,
    model: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """:raises OutOfMemoryError: the pool does not fit the device"""
    is_fp8 = meta.cache_type is PagedCacheType.F8E4M3
    layout = BlockLayout(
        block_size=meta.block_size,
        elements_per_token=model.kv_elements_per_token,
        bytes_per_element=1 if is_fp8 else dtype.itemsize,
        scale_bytes_per_token=fp8_scale_bytes(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads)
        if is_fp8
        else 0,
    )
    memory = device_memory(device)
    if meta.gpu_memory is not None:
        return blocks_for(meta.gpu_memory, layout, memory)
    if device.type == "cuda":
        return blocks_for(DEFAULT_CUDA_MEMORY, layout, memory)
    return auto_cpu_blocks(layout, memory, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def _kv_memory(
    config: EngineConfig, model: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[KvManager, AttentionBackend]:
    """The book-keeping and the storage of one kind of KV memory."""
    kind = "block-level, PagedAttention" if config.paged else "sequence-level, non-paged attention"
    _log.info("Prefix caching %s (%s).", "enabled" if config.prefix_cache_n else "disabled", kind)
    if not config.paged:
        slots = SequenceKvManager(
            max_sequence_tokens=config.max_model_len, max_num_seqs=config.max_num_seqs, num_kept=config.prefix_cache_n
        )
        return slots, ContiguousBackend(model, dtype=dtype, device=device)
    blocks = KvCacheManager(
        config.num_blocks,
        config.block_size,
        prefix_caching=config.prefix_cache_n > 0,
        sliding_window=config.sliding_window,
    )
    storage = PagedBackend(
        model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        cache_type=config.cache_type,
    )
    _log.info(
        "KV pool: %d blocks of %d tokens, %.1f MiB (%s).",
        config.num_blocks,
        config.block_size,
        storage.num_bytes / 2**20,
        config.cache_type.value,
    )
    return blocks, storage
