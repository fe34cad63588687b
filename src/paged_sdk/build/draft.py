"""Loads the draft model."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.attention.recurrent import state_bytes
from paged_sdk.build.device_setup import loading_memory_errors
from paged_sdk.build.device_steps import compile_argmax, compile_steps, live_compilations
from paged_sdk.build.fusing import fuse
from paged_sdk.build.kv_memory import make_kv_manager
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.loaded_model import LoadedModel, load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.build.location import model_path
from paged_sdk.build.sizing import resolve_draft
from paged_sdk.build.vocabulary import check_same_tokens
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.runner.draft_model import DraftModel
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["config_of_draft", "draft_state_bytes", "load_draft", "make_draft_model"]


def load_draft(target: LoadedModel, loading: Loading) -> LoadedModel | None:
    """Load a target's draft model, if one is requested.

    :param loading: the target's
    :raises ConfigError: the vocabularies differ, its keys cannot be stored as its target's, or it is the assistant of
        another model
    """
    source = resolve_draft(loading.settings, loading.environment)
    if source is None:
        return None
    path = model_path(source.model, source.settings)
    loading.check_cancelled()
    # Its KV is of the target's type, whatever its own builder says, and so is its prefix cache: see config_of_draft.
    asked = loading.settings
    settings = evolve(
        source.settings, paged_attn=asked.paged_attn, paged_meta=asked.paged_meta, prefix_cache_n=0, mtp=False
    )
    with loading_memory_errors(path):
        draft = load_weights(
            evolve(loading, path=path, settings=settings, encoder=None, backends=()), target=target.model
        )
    if draft.assistant is not None:  # of drafts, no bit is promised
        return evolve(draft, settings=evolve(draft.settings, batch_invariance=False))
    check_same_tokens(target.text.tokenizer, draft.text.tokenizer, source.model.location)
    draft.text.close()
    return draft


def config_of_draft(draft: LoadedModel, config: EngineConfig) -> EngineConfig:
    """Return the settings of a draft model.

    :param config: the target's settings
    """
    shape = draft.model.config
    return evolve(
        config,
        max_model_len=draft.max_model_len,
        sliding_window=shape.window,
        rope_switch=shape.rope_switch,
        prefix_cache_dir=None,  # its blocks are not stored
        # States of prefixes would take as much memory again, and chunks would have to end where they are kept.
        prefix_cache_n=0 if shape.recurrent_layers else config.prefix_cache_n,
    )


def draft_state_bytes(draft: LoadedModel, config: EngineConfig) -> int:
    """Return the bytes of one sequence's states in a draft model's recurrent layers; 0: it has none.

    :param config: the target's settings
    """
    return state_bytes(draft.model.config, draft.dtype, config_of_draft(draft, config).drafts_per_state)


def make_draft_model(
    draft: LoadedModel,
    config: EngineConfig,
    *,
    target_vocab_size: int,
    times: StepTimes,
    balance: DraftBalance,
    workspace: Workspace | None,
) -> DraftModel:
    """Make the draft model's runner, with its own KV memory for as many tokens as the target's.

    :param config: the target's settings
    :param target_vocab_size: vocabulary size of the target
    :param times: step times of the target
    :param balance: time that drafts have gained and lost so far
    """
    shape, own = draft.model.config, config_of_draft(draft, config)
    backend = make_storage(draft, own, workspace).make(own.num_blocks)
    model = fuse(draft.model, backend, draft.settings)
    on_cuda = all(device.type == "cuda" for device in draft.placement.devices)
    if own.paged and on_cuda:
        compile_steps(model, backend, own, visible=draft.settings.logging)
    if on_cuda:
        compile_argmax(shape.vocab_size, draft.placement.head)
    made = DraftModel(
        model,
        backend,
        make_kv_manager(own, shape),
        vocab_size=shape.vocab_size,
        target_vocab_size=target_vocab_size,
        gamma=config.gamma,
        max_tokens=min(draft.max_model_len, shape.rope_switch or draft.max_model_len),
        max_batched_tokens=config.max_num_batched_tokens,
        times=times,
        balance=balance,
    )
    if on_cuda:
        made.compilations = live_compilations(draft.placement.head)
    return made
