"""Makes what drafts with a model's layer for multi-token prediction (MTP)."""

from __future__ import annotations

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup
from paged_sdk.attention.choice import CANDIDATES, choose_storage
from paged_sdk.build.fusing import fuse
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.mtp_module import MtpModule
from paged_sdk.runner.beside_layers import BesideLayers
from paged_sdk.runner.mtp_drafts import MtpDrafts
from paged_sdk.runner.mtp_layer import MtpLayer, ScratchBlocks
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.step_times import StepTimes

__all__ = ["code_beside", "make_mtp_drafts", "make_mtp_layer"]


def make_mtp_drafts(
    layer: MtpLayer, loaded: LoadedModel, config: EngineConfig, *, times: StepTimes, balance: DraftBalance
) -> MtpDrafts:
    """Make what drafts with a model's layer for multi-token prediction.

    :param times: step times of the model
    :param balance: time that drafts have gained and lost so far
    """
    return MtpDrafts(
        layer,
        scratch=_scratch(config),
        vocab_size=loaded.model.config.vocab_size,
        gamma=config.gamma,
        max_tokens=loaded.max_model_len,
        times=times,
        balance=balance,
    )


def make_mtp_layer(
    loaded: LoadedModel, target: CausalModel, config: EngineConfig, workspace: Workspace | None
) -> MtpLayer | None:
    """Make a model's layer for multi-token prediction as it runs, with the storage of its keys and values, which are of
    the type of the model's; None: the model does not draft with one.

    :param target: the model as it runs
    :param config: the model's settings, with the number of blocks
    """
    weights, model = loaded.mtp, loaded.model
    if weights is None:
        return None
    assert isinstance(model, DecoderModel), "no other model has such a layer"
    scratch = _scratch(config)
    more = 0 if scratch is None else scratch.per_sequence * config.max_num_seqs
    setup = AttentionSetup(
        model=weights.config,
        engine=config,
        dtype=model.dtype,
        device=model.device,
        workspace=workspace,
        decompresses=not loaded.settings.batch_invariance,
        num_scratch=more,
    )
    backend = choose_storage(setup, CANDIDATES).make(config.num_blocks + more)
    running = fuse(weights.beside(model), backend, loaded.settings)
    assert isinstance(running, DecoderModel | FusedDecoderModel), "the layer is on one device"
    return MtpLayer(MtpModule(weights=weights, embedding=model.embedding, model=running), backend, target)


def code_beside(backend: AttentionBackend, layers: BesideLayers | None) -> bytes:
    """Return what the content of stored blocks depends on beside the model and its settings, which may include the KV
    of layers beside it.
    """
    return backend.code if layers is None or not layers.own_backends else backend.code + b"mtp"


def _scratch(config: EngineConfig) -> ScratchBlocks | None:
    if not config.paged:
        return None
    return ScratchBlocks(config.num_blocks, config.block_size, ScratchBlocks.needed(config.block_size, config.gamma))
