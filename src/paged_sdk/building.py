"""Defines a build in progress, which loads a model when it is awaited."""

from __future__ import annotations

import threading

from paged_sdk.build.collector import collector_paused
from paged_sdk.build.parts import ModelParts
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.env import read_environment, read_launch
from paged_sdk.errors import ModelLoadError
from paged_sdk.logs import show_logs
from paged_sdk.model import Model
from paged_sdk.opening import Opening
from paged_sdk.system.threads import in_own_thread

__all__ = ["Building"]


class Building(Opening[Model]):
    """Loads a model when awaited; as an async context manager it also closes the model on exit.

    It loads one model: awaiting or entering it again raises :class:`ConfigError`. In a process that was started as
    another rank than 0 (:attr:`rank`), it computes until rank 0 closes the model, and then raises ``SystemExit``.
    """

    def __init__(self, source: ModelSource, settings: BuildSettings) -> None:
        super().__init__("build()", setting="build")
        self._source = source
        self._settings = settings

    @property
    def rank(self) -> int:
        """Return this process's rank, if a model's processes are started one by one, as by torchrun. Other ranks than 0
        get no model: they compute for rank 0 for as long as building takes.

        :raises ConfigError: an environment variable is invalid
        """
        launch = read_launch() if self._settings.is_to_be_divided else None
        return 0 if launch is None else launch.rank

    def __repr__(self) -> str:
        # asyncio.run(builder.build()) is a natural mistake, and its error shows this and nothing else.
        return "<build(): await it in an async function, or pass it to BlockingModel, to get a model>"

    @classmethod
    def _made_by(cls) -> str:
        return "builder.build()"

    async def _open(self) -> Model:
        if self._settings.logging:
            show_logs()
        environment = read_environment()
        cancelled = threading.Event()

        def check_cancelled() -> None:
            if cancelled.is_set():
                raise ModelLoadError("the loading was cancelled")  # never seen: the caller was cancelled

        def load() -> ModelParts:
            if not self._settings.is_to_be_divided:  # other ranks are told of an error once there is a connection
                from paged_sdk.weights.hub import check_exists

                check_exists(self._source.location)  # a wrong path is not found only seconds later
            # Imported here because the tensor libraries take over a second to import, which belongs in the helper
            # thread.
            with collector_paused():
                from paged_sdk.build.assembly import load_parts

            return load_parts(self._source, self._settings, environment, check_cancelled=check_cancelled)

        try:
            parts = await in_own_thread(load, "to load a model in")
        except BaseException:
            cancelled.set()  # the thread stops before the next tensor and frees what it has loaded
            raise
        return Model(parts)
