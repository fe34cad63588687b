"""Define the base of objects that open a model when they are awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paged_sdk.errors import ConfigError
from paged_sdk.model import Model

__all__ = ["Opening"]

ModelT = TypeVar("ModelT", bound=Model)


class Opening(ABC, Generic[ModelT]):
    """Opens one model when awaited; as an async context manager it also closes the model on exit.

    Awaiting or entering it again raises :class:`ConfigError`.

    :param name: the object's name in that error's text
    :param setting: that error's ``setting``
    """

    def __init__(self, name: str, *, setting: str) -> None:
        self._name = name
        self._setting = setting
        self._model: ModelT | None = None
        self._has_begun = False

    if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

        def __getattr__(self, name: str) -> object:
            made_by = self._made_by()
            raise AttributeError(
                f"{made_by} has no {name!r}: await it to get a model, as in "
                f"`model = await {made_by}` or `async with {made_by} as model`"
            )

    def __await__(self) -> Generator[Any, Any, ModelT]:
        return self._open_once().__await__()

    async def __aenter__(self) -> ModelT:
        self._model = model = await self._open_once()
        return model

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._model is not None:
            await self._model.aclose()

    async def _open_once(self) -> ModelT:
        if self._has_begun:
            raise ConfigError(
                f"this {self._name} was used already: make another one for another model",
                setting=self._setting,
                allowed=f"one await or async with for each {self._name}",
            )
        self._has_begun = True
        return await self._open()

    @classmethod
    def _made_by(cls) -> str:
        """Return the expression that makes such an object, for a program that takes it for the model."""
        return f"{cls.__name__}(...)"

    @abstractmethod
    async def _open(self) -> ModelT:
        """Open the model, and leave nothing behind if that fails."""
