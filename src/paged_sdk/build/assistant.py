"""Makes an assistant as it runs."""

from __future__ import annotations

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.assistant_fit import kv_layers_read
from paged_sdk.build.fusing import fuse
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.errors import ConfigError
from paged_sdk.models.assistant import AssistantModule
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.runner.assistant import Assistant

__all__ = ["make_assistant"]


def make_assistant(
    draft: LoadedModel, loaded: LoadedModel, target: CausalModel, backend: AttentionBackend
) -> Assistant:
    """Make an assistant as it runs.

    :param draft: the assistant
    :param loaded: its target, for which :func:`~paged_sdk.build.assistant_fit.check_assistant` has found it fit
    :param target: the target as it runs
    :param backend: holds the target's keys and values
    :raises ConfigError: another model cannot read them
    """
    weights, model = draft.assistant, loaded.model
    assert weights is not None, "the draft model is no assistant"
    assert isinstance(model, DecoderModel), "check_assistant() refuses others"
    shape = weights.decoder.config
    view = backend.view(kv_layers_read(shape, model.config), shape.num_heads)
    if view is None:
        kind = type(backend).__name__
        raise ConfigError.of("draft", str(draft.path), f"no assistant beside a {kind}, which another model cannot read")
    running = fuse(weights.decoder, view, draft.settings)
    assert isinstance(running, DecoderModel | FusedDecoderModel), "the assistant is on one device"
    return Assistant(AssistantModule(weights=weights, embedding=model.embedding, model=running), view, target)
