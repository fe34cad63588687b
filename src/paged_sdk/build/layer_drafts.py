"""Makes layers that draft from a model's hidden states, and what drafts with them."""

from __future__ import annotations

from typing import Any

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.assistant import make_assistant
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.build.mtp import make_mtp_layer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.assistant import Assistant
from paged_sdk.runner.assistant_drafts import AssistantDrafts
from paged_sdk.runner.beside_layers import BesideLayers
from paged_sdk.runner.drafted_model import DraftedModel
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.runner.mtp_drafts import MtpDrafts
from paged_sdk.runner.mtp_layer import MtpLayer
from paged_sdk.scheduler.scheduler import Scheduler

__all__ = ["code_beside", "make_layer_drafts", "make_layers_beside"]


def make_layers_beside(
    loaded: LoadedModel,
    target: CausalModel,
    backend: AttentionBackend,
    *,
    assistant: LoadedModel | None,
    config: EngineConfig,
    workspace: Workspace | None,
) -> MtpLayer | Assistant | None:
    """Make layers that draft from the model's hidden states: its own, or an assistant; None: there are none.

    :param target: the model as it runs
    :param assistant: an assistant with its decoder; None: there is none
    :raises ConfigError: an assistant cannot read the model's keys and values
    """
    if assistant is not None:
        return make_assistant(assistant, loaded, target, backend)
    return make_mtp_layer(loaded, target, config, workspace)


def make_layer_drafts(
    layers: MtpLayer | Assistant | None, loaded: LoadedModel, config: EngineConfig, scheduler: Scheduler
) -> LayerDrafts[Any, Any] | None:
    """Make what drafts with such layers."""
    if layers is None:
        return None
    model = DraftedModel(
        vocab_size=loaded.model.config.vocab_size,
        max_tokens=loaded.max_model_len,
        gamma=config.gamma,
        times=scheduler.costs.times,
        balance=scheduler.costs.drafts.open_balance(),
    )
    return MtpDrafts(layers, model) if isinstance(layers, MtpLayer) else AssistantDrafts(layers, model)


def code_beside(backend: AttentionBackend, layers: BesideLayers | None) -> bytes:
    """Return what the content of stored blocks depends on beside the model and its settings, which may include the KV
    of layers beside it.
    """
    return backend.code if layers is None or not layers.own_backends else backend.code + b"mtp"
