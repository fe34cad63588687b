"""Makes a model's layer for multi-token prediction (MTP) as it runs."""

from __future__ import annotations

from paged_sdk.attention.backend import AttentionSetup
from paged_sdk.attention.choice import CANDIDATES, choose_storage
from paged_sdk.build.fusing import fuse
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.mtp_module import MtpModule
from paged_sdk.runner.mtp_layer import MtpLayer, ScratchBlocks

__all__ = ["make_mtp_layer"]


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
    module = MtpModule(weights=weights, embedding=model.embedding, model=running)
    return MtpLayer(module, backend, target, scratch)


def _scratch(config: EngineConfig) -> ScratchBlocks | None:
    if not config.paged:
        return None
    return ScratchBlocks(config.num_blocks, config.block_size, ScratchBlocks.needed(config.block_size, config.gamma))
