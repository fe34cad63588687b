"""Describes the bodies that load and unload adapters, with the field names of vLLM's server."""

from __future__ import annotations

from typing import Annotated, Final, Required, TypedDict

from paged_sdk.wire.body import BodyReader, Bounds

__all__ = ["LOAD_ADAPTER", "UNLOAD_ADAPTER", "LoadAdapterBody", "UnloadAdapterBody"]


class LoadAdapterBody(TypedDict, total=False):
    """Describes the body of ``/v1/load_lora_adapter``."""

    lora_name: Required[Annotated[str, Bounds(1, 256), "Its name, to be used as a model."]]
    lora_path: Required[Annotated[str, Bounds(1, 4096), "Its path in the server's adapter folder."]]
    base_model_name: Annotated[str | None, "The model that it is for, if there are several."]


class UnloadAdapterBody(TypedDict, total=False):
    """Describes the body of ``/v1/unload_lora_adapter``."""

    lora_name: Required[Annotated[str, "Its name."]]
    lora_int_id: Annotated[None, "adapters are told apart by their names"]


LOAD_ADAPTER: Final = BodyReader(LoadAdapterBody)
UNLOAD_ADAPTER: Final = BodyReader(UnloadAdapterBody)
