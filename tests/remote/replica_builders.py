"""Build fakes for replicas' processes, which import this by its name."""

from __future__ import annotations

import os

import anyio
from attrs import frozen

from paged_sdk import ConfigError
from paged_sdk.testing import FakeModel, fake_model

__all__ = ["Dying", "Endless", "Fakes", "Refusing"]


@frozen
class Fakes:
    """Builds a model that says a text."""

    text: str = "Hello!"
    delay: float = 0.0

    async def build(self) -> FakeModel:
        return fake_model(self.text, delay=self.delay)


@frozen
class Refusing:
    """Builds nothing, with a typed error."""

    async def build(self) -> FakeModel:
        raise ConfigError.of("threads", 3, "none at all")


@frozen
class Dying:
    """Ends its process."""

    async def build(self) -> FakeModel:
        os._exit(7)


@frozen
class Endless:
    """Does not come to an end."""

    async def build(self) -> FakeModel:
        await anyio.sleep_forever()
        raise AssertionError
