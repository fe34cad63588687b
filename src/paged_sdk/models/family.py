"""Define families of models, and find a checkpoint's: a family's file is named after Hugging Face's ``model_type``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

from attrs import evolve, frozen

import paged_sdk.models
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.tensor_names import TensorNames

__all__ = [
    "DecoderFamily",
    "NestedFamily",
    "Sizes",
    "find_family",
    "has_family",
    "has_head",
    "ranks_texts",
    "read_config",
    "supported_families",
    "takes_images",
]


_WITH_HEAD: Final = "ForCausalLM"


@frozen(kw_only=True)
class Sizes:
    """Holds the default sizes of transformers' config class of a family.

    A decoder's own config.json states all sizes. If the decoder is a section of another model's config, transformers
    omits those that equal the defaults: LLaVA 1.5's section, of a 7B Vicuna, states only the vocabulary size.
    """

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int

    def complete(self, section: ConfigFields) -> ConfigFields:
        """Return a section with the sizes that it omits."""
        return section.with_defaults(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
        )


@frozen(kw_only=True)
class DecoderFamily:
    """Describes a family; each family's file defines one as ``FAMILY``.

    :ivar architectures: Hugging Face's ``architectures`` that generate text with this decoder
    :ivar read: makes the decoder's shape from config.json
    :ivar names: possible tensor names; the first whose embeddings are in the checkpoint are used
    :ivar sizes: sizes that the config may omit if it is a section of another model's; None: ``read`` has the defaults
    :ivar reads_layer_config: whether ``read`` takes ``per_layer_config``, which other families refuse
    """

    architectures: tuple[str, ...]
    read: Callable[[ConfigFields], DecoderConfig]
    names: tuple[TensorNames, ...] = (TensorNames(),)
    sizes: Sizes | None = None
    reads_layer_config: bool = False

    def read_section(self, section: ConfigFields) -> DecoderConfig:
        """Make the decoder's shape from a section of another model's config, which may omit default sizes."""
        return self.read(section if self.sizes is None else self.sizes.complete(section))

    @property
    def bodies(self) -> tuple[str, ...]:
        """Return Hugging Face's names of this decoder's classes without an output projection."""
        return self._named("Model", "TextModel")

    @property
    def rankers(self) -> tuple[str, ...]:
        """Return Hugging Face's names of this decoder's classes for sequence classification."""
        return self._named("ForSequenceClassification", "TextForSequenceClassification")

    def _named(self, *ends: str) -> tuple[str, ...]:
        stems = [each.removesuffix(_WITH_HEAD) for each in self.architectures if each.endswith(_WITH_HEAD)]
        return tuple(f"{stem}{end}" for stem in stems for end in ends)


@frozen(kw_only=True)
class NestedFamily:
    """Describes a family with an image encoder and a decoder of another family; its file defines one as ``FAMILY``.

    :ivar architectures: see :class:`DecoderFamily`
    :ivar text: name of config.json's section of the decoder
    :ivar text_type: the decoder's ``model_type`` if the section does not state it
    :ivar places: possible prefixes of the decoder's tensors, each with the name of the output projection
    :ivar ties: default of the whole config's ``tie_word_embeddings``
    :ivar adapt: adapts the decoder's shape to the whole config
    :ivar unused: prefixes of the tensors that belong neither to the decoder nor to the encoder
    :ivar images_elsewhere: returns whether transformers has to run a checkpoint for its images, by config.json
    """

    architectures: tuple[str, ...]
    text: str = "text_config"
    text_type: str = "llama"
    places: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "language_model.lm_head"),
        ("model.language_model.", "lm_head"),
    )
    ties: bool = False
    adapt: Callable[[DecoderConfig, ConfigFields], DecoderConfig] = lambda shape, fields: shape
    unused: tuple[str, ...] = ()
    images_elsewhere: Callable[[ConfigFields], bool] = lambda fields: False

    def resolve(self, fields: ConfigFields) -> DecoderFamily:
        """Return the decoder's family, adapted to the config and tensor names of this one.

        :raises UnsupportedArchitectureError: the decoder's ``model_type`` is not supported
        """
        name = self._section(fields).text("model_type")
        inner = _family_named(name)
        if not isinstance(inner, DecoderFamily):
            known = [each for each, family in supported_families().items() if isinstance(family, DecoderFamily)]
            raise UnsupportedArchitectureError(
                f"config.json: {self.text}.model_type {shown(name)} is not supported: expected one of "
                f"{', '.join(known)}",
                architecture=name,
                supported=known,
            )

        def read(whole: ConfigFields) -> DecoderConfig:
            own = self._section(whole)
            shape = inner.read_section(own)
            ties = whole.flag("tie_word_embeddings", self.ties) or own.flag("tie_word_embeddings", False)
            return self.adapt(evolve(shape, tie_embeddings=ties), whole)

        return DecoderFamily(
            architectures=self.architectures,
            read=read,
            names=tuple(
                evolve(each, body=body, head=head, unused=self.unused)
                for each in inner.names
                for body, head in self.places
            ),
        )

    def _section(self, fields: ConfigFields) -> ConfigFields:
        """Return the decoder's fields; in older configs they are at the top level, beside the encoder's section."""
        own = fields.section(self.text)
        if own.values():
            return own.with_defaults(model_type=self.text_type)
        return ConfigFields({**fields.values(), "model_type": self.text_type})


AnyFamily: TypeAlias = DecoderFamily | NestedFamily


def supported_families() -> dict[str, AnyFamily]:
    """Return all families by ``model_type``, sorted. This imports every file of the package."""
    modules = sorted(module.name for module in pkgutil.iter_modules(paged_sdk.models.__path__))
    found = {name: _family_named(name) for name in modules}
    return {name: family for name, family in found.items() if family is not None}


def _family_named(model_type: str) -> AnyFamily | None:
    """Return the family of a ``model_type``, importing only its file; None if there is no such family."""
    module = f"{paged_sdk.models.__name__}.{model_type}"
    # Checkpoints are not trusted: a name with a dot would be looked for in other packages.
    if not model_type.isidentifier() or find_spec(module) is None:
        return None
    family = getattr(import_module(module), "FAMILY", None)
    return family if isinstance(family, AnyFamily) else None


def _of_config(config: Mapping[str, Any]) -> AnyFamily | None:
    return _family_named(ConfigFields(config).text("model_type", ""))


def has_family(config: Mapping[str, Any]) -> bool:
    """Return whether a family has the checkpoint's ``model_type``.

    :param config: config.json's content
    """
    return _of_config(config) is not None


def takes_images(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's family, which it has, can serve its images; if not, transformers does.

    :param config: config.json's content
    """
    family = _of_config(config)
    return not (isinstance(family, NestedFamily) and family.images_elsewhere(ConfigFields(config)))


def find_family(config: Mapping[str, Any]) -> DecoderFamily:
    """Find the family of a checkpoint. A class without an output projection is read as one with tied embeddings, so
    that no other code needs to distinguish them; :func:`has_head` does.

    :param config: config.json's content
    :raises UnsupportedArchitectureError: no family has this ``model_type``, or the class is for another task
    """
    fields = ConfigFields(config)
    model_type = fields.text("model_type", "")
    family = _family_named(model_type)
    if family is None:
        families = supported_families()
        raise UnsupportedArchitectureError(
            f"model_type {shown(model_type)} is not supported: expected one of {', '.join(families)}",
            architecture=model_type,
            supported=families,
        )
    reads_layers = isinstance(family, DecoderFamily) and family.reads_layer_config
    if fields.is_set("per_layer_config") and not reads_layers:
        raise UnsupportedArchitectureError(
            f"{fields.shown('per_layer_config')} is not supported: all layers have one shape",
            architecture=model_type,
            supported=supported_families(),
        )
    # A config made from GGUF metadata names no class.
    architectures = fields.texts("architectures")
    if isinstance(family, DecoderFamily) and _is_among((*family.bodies, *family.rankers), architectures):
        return _with_tied_head(family)
    if architectures and not _is_among(family.architectures, architectures):
        raise UnsupportedArchitectureError(
            f"architectures {shown(list(architectures))} of model_type {shown(model_type)} are not supported: "
            f"expected one of {', '.join(family.architectures)}",
            architecture=architectures[0],
            supported=family.architectures,
        )
    return family.resolve(fields) if isinstance(family, NestedFamily) else family


def _is_among(classes: Collection[str], named: Collection[str]) -> bool:
    """Return whether a config names one of some classes, ignoring case: early checkpoints name their makers' classes,
    such as PhiMoEForCausalLM and MPTForCausalLM, which transformers later spelled with other capitals.
    """
    return not {name.lower() for name in classes}.isdisjoint(name.lower() for name in named)


def _with_tied_head(family: DecoderFamily) -> DecoderFamily:
    return evolve(family, read=lambda fields: evolve(family.read(fields), tie_embeddings=True, head_bias=False))


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's class has an output projection, its own or tied.

    :param config: config.json's content
    """
    return not _is_one_of(config, lambda family: (*family.bodies, *family.rankers))


def ranks_texts(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's class is one for sequence classification, with ranking layers.

    :param config: config.json's content
    """
    return _is_one_of(config, lambda family: family.rankers)


def _is_one_of(config: Mapping[str, Any], classes: Callable[[DecoderFamily], Collection[str]]) -> bool:
    family = _of_config(config)
    return isinstance(family, DecoderFamily) and _is_among(classes(family), ConfigFields(config).texts("architectures"))


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the shape of a checkpoint's decoder.

    :param config: config.json's content
    :raises UnsupportedArchitectureError: see :func:`find_family`
    :raises CheckpointError: a value is missing or invalid
    """
    return find_family(config).read(ConfigFields(config))
