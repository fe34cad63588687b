"""Loads and unloads adapters on request, only from one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paged_sdk import InvalidRequestError
from paged_sdk.server.bodies import read_body
from paged_sdk.server.drain import Drain
from paged_sdk.server.served_models import Served, ServedModels
from paged_sdk.server.settings import ServerSettings
from paged_sdk.wire.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER
from paged_sdk.wire.models import model_card
from paged_sdk.wire.problem import Problem, ProblemError

__all__ = ["AdapterRoutes"]

MAX_BODY_BYTES: Final = 1 << 16


@frozen(kw_only=True)
class AdapterRoutes:
    """Serves the endpoints that load and unload adapters.

    Running requests of an adapter finish before it is unloaded.
    """

    models: ServedModels
    settings: ServerSettings
    drain: Drain

    async def load(self, request: Request) -> Response:
        """Load an adapter.

        :raises ProblemError: no folder is configured
        :raises PagedError: the adapter is not in the folder, its name is taken, or its files are invalid
        """
        body = await read_body(request, LOAD_ADAPTER.read, MAX_BODY_BYTES, self.drain)
        path = self._path(body["lora_path"])
        served = self._base(body.get("base_model_name"))
        name = body["lora_name"]
        if any(card.id == name for card in self.models.cards()):
            raise InvalidRequestError.of("lora_name", name, "a name that no other model has")
        await served.model.load_adapter(path, name=name)
        return JSONResponse(next(model_card(card) for card in self.models.cards() if card.id == name))

    async def unload(self, request: Request) -> Response:
        """Unload an adapter.

        :raises ProblemError: no folder is configured, or there is no such adapter
        """
        body = await read_body(request, UNLOAD_ADAPTER.read, MAX_BODY_BYTES, self.drain)
        self._folder()
        served = self.models.find(body["lora_name"], param="lora_name")
        if served.adapter is None:
            raise InvalidRequestError.of("lora_name", body["lora_name"], "an adapter: this is a model")
        await served.model.unload_adapter(served.adapter)
        return JSONResponse({"id": served.adapter, "object": "model", "deleted": True})

    def _folder(self) -> Path:
        if self.settings.adapter_folder is None:
            message = "adapters cannot be loaded by request: the server has no folder of adapters (--adapter-folder)"
            raise ProblemError(Problem(status=403, message=message, code="not_allowed"))
        return self.settings.adapter_folder

    def _path(self, given: str) -> Path:
        """Return an adapter's path, which must be within the folder."""
        folder = self._folder().resolve()
        try:
            path = (folder / given).resolve()
            is_there = path != folder and path.is_relative_to(folder) and path.exists()
        except (OSError, ValueError):  # a name that no file system allows
            is_there = False
        if not is_there:  # the same error for every path outside: clients must not learn which files exist
            raise InvalidRequestError.of("lora_path", given, "the path of an adapter within the server's folder")
        return path

    def _base(self, name: str | None) -> Served:
        models = self.models.names
        if name is None and len(models) > 1:
            raise InvalidRequestError.of("base_model_name", name, f"one of {', '.join(models)}")
        served = self.models.find(models[0] if name is None else name, param="base_model_name")
        if served.adapter is not None:
            raise InvalidRequestError.of("base_model_name", name, "a model: this is an adapter")
        return served
