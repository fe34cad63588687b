"""Makes a model's adapter bank, and loads the adapters named in the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.build.location import hub_token
from paged_sdk.config.build import BuildSettings
from paged_sdk.errors import AdapterError, ModelLoadError
from paged_sdk.models.causal_model import CausalModel, RankingModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import fused_spans, native_projections
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.weights.hub import resolve_model

__all__ = ["load_adapters", "make_bank"]


def make_bank(loaded: LoadedModel, model: CausalModel) -> AdapterBank:
    """Make the bank that holds a model's adapters.

    :param model: the model that computes the steps, after fusing
    """
    settings = loaded.settings

    def resolve(location: str) -> Path:
        try:
            return resolve_model(location, token=hub_token(settings.token_source), gguf=False)
        except ModelLoadError as error:
            raise AdapterError(str(error), path=error.path) from error

    own = loaded.model
    rank_head = own.rank_head if isinstance(own, RankingModel) else None
    group = own.group if isinstance(own, DecoderModel) else None
    return AdapterBank(
        own.adaptable,
        dtype=own.dtype,
        device=own.device,
        linear_of=own.adaptable_linear,
        layers=native_projections(own) if isinstance(own, DecoderModel) else (),
        head=own.head_name if isinstance(own, DecoderModel) else "",
        embedding=own.embedding_name if isinstance(own, DecoderModel) else "",
        head_dim=own.config.head_dim if isinstance(own, DecoderModel) else 0,
        whole={} if rank_head is None else rank_head.tensors,
        fused=fused_spans(model),
        resolve=resolve,
        send_message=None if group is None or group.rank else group.send_message,
    )


def load_adapters(
    bank: AdapterBank, settings: BuildSettings, check_cancelled: Callable[[], None]
) -> dict[str, AdapterUse]:
    """Load the adapters named in the settings, and return them by name.

    :raises AdapterError: an adapter cannot be read, or was made for another model
    """
    uses: dict[str, AdapterUse] = {}
    for source in settings.adapters:
        check_cancelled()
        fitted = bank.read(source.location)
        uses[source.name] = fitted.use(bank.take(fitted), source.name)
    return uses
