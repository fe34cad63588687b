"""Find models, and adapters of theirs, by the names that clients have for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final, TypeAlias

from attrs import evolve, frozen

from paged_sdk import ConfigError, Model, PagedError
from paged_sdk.wire.models import ModelCard
from paged_sdk.wire.problem import Problem, ProblemError

__all__ = ["ModelSource", "Served", "ServedModels"]

LOADING_SECONDS: Final = 5
"""When to ask again for a model that is loading: it takes seconds or minutes."""

ModelSource: TypeAlias = Model | Callable[[], AbstractAsyncContextManager[Model]]
"""A model that somebody else closes, or what opens one, such as a builder's ``build``."""


@frozen(kw_only=True)
class Served:
    """Is what a name stands for.

    :ivar name: the model's, without its adapters
    """

    name: str
    model: Model
    adapter: str | None = None


class ServedModels:
    """Holds the models of a server. Those that it opens are closed with it.

    :param sources: models by name
    """

    def __init__(self, sources: Mapping[str, ModelSource]) -> None:
        for name, source in sources.items():
            if not isinstance(name, str) or not name:
                raise ConfigError.of("models", name, "names of at least one character")
            if not isinstance(source, Model) and not callable(source):
                raise ConfigError.of("models", source, "models, or functions that open one, such as a builder's build")
        if not sources:
            raise ConfigError.of("models", sources, "at least one model")
        self._sources = dict(sources)
        self._models = {name: source for name, source in sources.items() if isinstance(source, Model)}
        self._created = dict.fromkeys(self._models, int(time.time()))

    @property
    def are_ready(self) -> bool:
        """Tell whether all models are open."""
        return len(self._models) == len(self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all models, open or not."""
        return tuple(self._sources)

    @property
    def all(self) -> Mapping[str, Model]:
        """Return the open models by name."""
        return self._models

    def failed(self) -> list[str]:
        """Return the names of models that answer no more."""
        names = []
        for name, model in self._models.items():
            try:
                model.check()
            except PagedError:
                names.append(name)
        return names

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open the models that are not open yet, one after the other, and close these in the end."""
        async with AsyncExitStack() as stack:
            opened = []
            for name, source in self._sources.items():
                if not isinstance(source, Model):
                    self._models[name] = await stack.enter_async_context(source())
                    self._created[name] = int(time.time())
                    opened.append(name)
            try:
                yield
            finally:
                for name in opened:
                    del self._models[name]

    def cards(self) -> list[ModelCard]:
        """Return what can be asked, each model before its adapters."""
        cards = []
        for name, model in self._models.items():
            card = ModelCard(
                id=name,
                created=self._created[name],
                max_model_len=model.max_sequence_length,
                takes_images=model.takes_images,
                generates_text=model.generates_text,
                ranks_texts=model.ranks_texts,
            )
            cards.append(card)
            cards += [evolve(card, id=adapter, parent=name) for adapter in model.adapters]
        return cards

    def find(self, name: str, *, param: str = "model") -> Served:
        """Return what a name stands for. Models come before adapters of the same name.

        :param param: the field that says the name
        :raises ProblemError: nothing, or what is not open yet
        """
        if name in self._models:
            return Served(name=name, model=self._models[name])
        for model_name, model in self._models.items():
            if name in model.adapters:
                return Served(name=model_name, model=model, adapter=name)
        if not self.are_ready:  # it may be one of those, or an adapter of theirs
            raise ProblemError(
                Problem(
                    status=503,
                    message=f"{name[:100]!r} may be a model that is still loading",
                    type="server_error",
                    code="unavailable",
                    param=param,
                    headers={"Retry-After": str(LOADING_SECONDS)},
                )
            )
        names = ", ".join(card.id for card in self.cards())
        raise ProblemError(
            Problem(
                status=404,
                message=f"there is no model {name[:100]!r}: there are {names}",
                code="model_not_found",
                param=param,
            )
        )
