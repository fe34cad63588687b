"""Decides whether a model drafts with its layer for multi-token prediction (MTP), and makes what does."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup
from paged_sdk.attention.choice import CANDIDATES, choose_storage
from paged_sdk.build.fusing import fuse
from paged_sdk.build.loading import Loading
from paged_sdk.build.sizing import resolve_draft
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import MTP
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.mtp_module import MtpModule
from paged_sdk.runner.mtp_drafts import MtpDrafts, ScratchBlocks
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["loads_mtp", "make_mtp_drafts", "refuse_isq_beside_mtp"]

_log = get_logger(__name__)


def loads_mtp(loading: Loading, placement: Placement, *, name: str, has_layer: bool, is_divided: bool) -> bool:
    """Return whether a checkpoint's layer for multi-token prediction is to be loaded.

    :param name: the checkpoint's name
    :param has_layer: whether it has such a layer
    :param is_divided: whether the model is divided among ranks
    :raises ConfigError: the builder asks for it, and the model cannot draft with it; if the environment does, which may
        be meant for another model of the process, there is a line in the log instead
    """
    settings, environment = loading.settings, loading.environment
    asked = environment.mtp if settings.mtp is None else settings.mtp
    if not asked or (settings.mtp is None and resolve_draft(settings, environment) is not None):
        return False
    needed = None
    if not has_layer:
        needed = f"a checkpoint with a layer for multi-token prediction: {name} has none that is known here"
    elif is_divided:
        needed = "a model in one process: ranks do not draft"
    elif not placement.is_one_device or placement.embedding.type != "cpu":
        needed = f"a model on the CPU, here {placement}"
    if needed is None:
        return True
    if settings.mtp is not None:
        raise ConfigError.of("mtp", True, needed)
    _log.info("%s has no effect here: it needs %s.", MTP, needed)
    return False


def make_mtp_drafts(
    module: MtpModule,
    target: CausalModel,
    config: EngineConfig,
    settings: BuildSettings,
    *,
    max_model_len: int,
    times: StepTimes,
    balance: DraftBalance,
    workspace: Workspace | None,
) -> MtpDrafts:
    """Make what drafts with a model's layer for multi-token prediction.

    :param target: the model as it runs
    :param config: the model's settings, with the number of blocks
    :param times: step times of the model
    :param balance: time that drafts have gained and lost so far
    """
    scratch = None
    if config.paged:
        per_sequence = ScratchBlocks.needed(config.block_size, config.gamma)
        scratch = ScratchBlocks(config.num_blocks, config.block_size, per_sequence)
    more = 0 if scratch is None else scratch.per_sequence * config.max_num_seqs
    backend = _backend(module.config, config, settings, module, workspace, config.num_blocks + more)
    assert isinstance(module.model, DecoderModel), "it is made for one backend"
    model = fuse(module.model, backend, settings)
    assert isinstance(model, DecoderModel | FusedDecoderModel)
    return MtpDrafts(
        evolve(module, model=model),
        backend,
        target,
        scratch=scratch,
        vocab_size=module.config.vocab_size,
        gamma=config.gamma,
        max_tokens=max_model_len,
        times=times,
        balance=balance,
    )


def _backend(
    shape: DecoderConfig,
    config: EngineConfig,
    settings: BuildSettings,
    module: MtpModule,
    workspace: Workspace | None,
    num_blocks: int,
) -> AttentionBackend:
    """Make the storage of the layer's keys and values, of the type of the model's."""
    setup = AttentionSetup(
        model=shape,
        engine=config,
        dtype=module.model.dtype,
        device=module.model.device,
        workspace=workspace,
        decompresses=not settings.batch_invariance,
    )
    return choose_storage(setup, CANDIDATES).make(num_blocks)


def refuse_isq_beside_mtp(isq: IsqType) -> None:
    """Refuse to requantize the weights of a model that drafts with its layer for multi-token prediction.

    :raises ConfigError: always
    """
    allowed = "a model without mtp, whose layer is not quantized again: quantize it while it is loaded, by with_isq()"
    raise ConfigError.of("isq", isq.value, allowed)
