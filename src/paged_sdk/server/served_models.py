"""Finds models and adapters by the names that clients use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final, TypeAlias

from attrs import evolve, frozen

from paged_sdk import ConfigError, Model, PagedError
from paged_sdk.wire.models import ModelCard
from paged_sdk.wire.problem import Problem, ProblemError

__all__ = ["ModelSource", "Served", "ServedModels", "is_running"]

LOADING_SECONDS: Final = 5
"""``Retry-After`` for a model that is loading, which takes seconds or minutes."""

ModelSource: TypeAlias = Model | Callable[[], AbstractAsyncContextManager[Model]]
"""An open model, which its owner closes, or a function that opens one, such as a builder's ``build``."""


@frozen(kw_only=True)
class Served:
    """Holds the model, and the adapter if any, that a name refers to.

    :ivar name: the model's name
    """

    name: str
    model: Model
    adapter: str | None = None


class ServedModels:
    """Holds the models of a server. Models that the server opens are closed with it.

    :param sources: models by name, open or to be opened
    """

    def __init__(self, sources: Mapping[str, ModelSource]) -> None:
        if not isinstance(sources, Mapping):
            raise ConfigError.of("models", sources, 'a model, or models by name, such as {"small": builder.build}')
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
        """Return the names of models whose engine has stopped."""
        return [name for name, model in self._models.items() if not is_running(model)]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open the models that are not open yet, one after the other, and close them at the end."""
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
        """Describe all open models and their adapters, each model before its adapters."""
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
        """Find a model or an adapter by name. Models take precedence over adapters of the same name.

        :param param: the field that holds the name, for errors
        :raises ProblemError: unknown name, or models are still loading
        """
        if name in self._models:
            return Served(name=name, model=self._models[name])
        for model_name, model in self._models.items():
            if name in model.adapters:
                return Served(name=model_name, model=model, adapter=name)
        if not self.are_ready:  # the name may be that of a loading model, or of its adapter
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


def is_running(model: Model) -> bool:
    """Tell whether a model's engine runs: it has neither stopped nor been closed."""
    try:
        model.check()
    except PagedError:
        return False
    return True
