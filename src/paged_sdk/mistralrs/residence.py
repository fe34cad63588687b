"""Holds a model that can be unloaded and loaded again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from paged_sdk import BlockingModel, ConfigError, ModelClosedError

__all__ = ["Residence", "Status"]

Status: TypeAlias = Literal["loaded", "unloaded", "reloading"]


class Residence:
    """Holds a model that can be unloaded, and is loaded again when needed. May be used from any thread.

    :param load: loads the model; called at once, and again whenever an unloaded model is needed
    :param when_reloaded: called after the model was loaded again, before it is used
    :raises PagedError: an error of ``load``
    """

    def __init__(
        self, load: Callable[[], BlockingModel], *, when_reloaded: Callable[[], object] = lambda: None
    ) -> None:
        self._load: Final = load
        self._when_reloaded: Final = when_reloaded
        self._lock: Final = threading.Lock()
        self._status: Status = "loaded"
        self._is_closed = False
        self._model: BlockingModel | None = load()

    @property
    def status(self) -> Status:
        """Return the model's status."""
        return self._status

    def model(self) -> BlockingModel:
        """Return the model, after loading it again if it was unloaded.

        :raises ModelClosedError: the runner is closed
        :raises ModelLoadError: the model can no longer be loaded
        """
        with self._lock:
            self._check_open()
            return self._model or self._reload()

    def unload(self) -> None:
        """Free the model's memory; running requests end.

        :raises ConfigError: the model is unloaded already
        :raises ModelClosedError: the runner is closed
        """
        with self._lock:
            self._check_open()
            if self._model is None:
                raise ConfigError.of("unload_model", self._status, "a model that is loaded")
            self._model.close()
            self._model, self._status = None, "unloaded"

    def reload(self) -> None:
        """Load an unloaded model again.

        :raises ConfigError: the model is loaded
        :raises ModelClosedError: the runner is closed
        :raises ModelLoadError: the model can no longer be loaded
        """
        with self._lock:
            self._check_open()
            if self._model is not None:
                raise ConfigError.of("reload_model", self._status, "a model that was unloaded")
            self._reload()

    def close(self) -> None:
        """End running requests and release everything. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._model is not None:
                self._model.close()
                self._model, self._status = None, "unloaded"

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelClosedError("the runner is closed: make another one")

    def _reload(self) -> BlockingModel:
        self._status = "reloading"
        try:
            self._model = self._load()
            self._when_reloaded()
        finally:
            self._status = "unloaded" if self._model is None else "loaded"
        return self._model
