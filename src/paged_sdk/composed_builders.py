"""Defines the builders made of others: a model with adapters, and a model with a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from attrs import Attribute, evolve, field, frozen

from paged_sdk.builders import GgufModelBuilder, TextModelBuilder, VisionModelBuilder
from paged_sdk.building import Building
from paged_sdk.config.build import BuildSettings, DraftSource, ModelSource
from paged_sdk.config.checks import IsA
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.errors import ConfigError

__all__ = ["LoraModelBuilder", "TextSpeculativeBuilder"]


def _is_builder(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, TextModelBuilder | GgufModelBuilder | VisionModelBuilder):
        raise ConfigError.of(attribute.name, value, "a TextModelBuilder, GgufModelBuilder or VisionModelBuilder")


def _is_text_builder(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, TextModelBuilder | GgufModelBuilder):
        raise ConfigError.of(attribute.name, value, "a TextModelBuilder or GgufModelBuilder")


@frozen
class LoraModelBuilder:
    """Builds a model together with adapters. :meth:`TextModelBuilder.with_adapter` does the same for one.

    A request that names no adapter uses the base alone.

    :param text_builder: the base
    :raises ConfigError: for anything else
    """

    text_builder: TextModelBuilder | GgufModelBuilder | VisionModelBuilder = field(validator=_is_builder)

    @classmethod
    def from_text_model_builder(
        cls,
        text_builder: TextModelBuilder | GgufModelBuilder | VisionModelBuilder,
        adapters: Iterable[str | PathLike[str]] | Mapping[str, str | PathLike[str]],
    ) -> LoraModelBuilder:
        """Make a builder of a base and its adapters.

        :param adapters: directories or Hub ids, whose last parts become the names; or a mapping of names to these
        :raises ConfigError: two adapters have the same name
        """
        if isinstance(adapters, str | bytes | PathLike) or not isinstance(adapters, Iterable):
            raise ConfigError.of("adapters", adapters, "a list of paths, or paths by name")
        built = cls(text_builder).text_builder
        named = adapters.items() if isinstance(adapters, Mapping) else ((None, path) for path in adapters)
        for name, path in named:
            built = built.with_adapter(path, name=name)
        return cls(built)

    @property
    def source(self) -> ModelSource:
        """Return which model is built."""
        return self.text_builder.source

    @property
    def settings(self) -> BuildSettings:
        """Return the base's settings, with the adapters."""
        return self.text_builder.settings

    def build(self) -> Building:
        """Load the base and its adapters: ``await`` it, or ``async with`` it; see :meth:`TextModelBuilder.build`.

        :raises AdapterError: an adapter cannot be read, or was made for another model
        """
        return Building(self.source, self.settings)


@frozen
class TextSpeculativeBuilder:
    """Builds a model with a smaller draft model, whose draft tokens it verifies, several in one step.

    The output is what the model would generate by itself. Both models need the same vocabulary. The draft model may be
    the model's assistant (Gemma 4), which reads the model's own keys and values.

    :param target_builder: the model
    :param draft_builder: the draft model. It sets how the draft model is loaded (dtype, quantization, files); the
        target sets how requests are run. An assistant has the target's dtype
    :param config: the maximum number of draft tokens at a time; fewer are made where fewer pay
    :raises ConfigError: for anything else, or a draft model on another device
    """

    target_builder: TextModelBuilder | GgufModelBuilder | VisionModelBuilder = field(validator=_is_builder)
    draft_builder: TextModelBuilder | GgufModelBuilder = field(validator=_is_text_builder)
    config: SpeculativeConfig = field(factory=SpeculativeConfig, validator=IsA(SpeculativeConfig))

    def __attrs_post_init__(self) -> None:
        device = self.draft_builder.settings.device
        if device not in ("auto", self.target_builder.settings.device):
            raise ConfigError.of("device", device, f"the target's, {self.target_builder.settings.device}")
        if adapters := self.draft_builder.settings.adapters:
            raise ConfigError.of("with_adapter", adapters[0].name, "no adapter for the draft model")
        if encoder := self.draft_builder.source.mmproj:
            raise ConfigError.of("with_mmproj", encoder, "no image encoder for the draft model")
        if (ranks := self.draft_builder.settings.tensor_parallel) not in (None, 1):
            raise ConfigError.of("with_tensor_parallel", ranks, "1 for the draft model: rank 0 holds all of it")
        if self.config.mtp or self.target_builder.settings.mtp:
            raise ConfigError.of("mtp", True, "False beside a draft model: one of the two drafts")

    @property
    def source(self) -> ModelSource:
        """Return which model is built."""
        return self.target_builder.source

    @property
    def settings(self) -> BuildSettings:
        """Return the target's settings, and its draft model."""
        draft = DraftSource(model=self.draft_builder.source, settings=self.draft_builder.settings)
        return evolve(self.target_builder.settings, gamma=self.config.gamma, mtp=False, draft=draft)

    def build(self) -> Building:
        """Load both models: ``await`` it, or ``async with`` it; see :meth:`TextModelBuilder.build`."""
        return Building(self.source, self.settings)
