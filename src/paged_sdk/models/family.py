"""Define a family of models, and find it: the file name in this package is Hugging Face's ``model_type``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from attrs import evolve, frozen

import paged_sdk.models
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.models.config_fields import ConfigFields

__all__ = [
    "DecoderFamily",
    "ExpertNames",
    "NestedFamily",
    "NormNames",
    "Sizes",
    "TensorNames",
    "find_family",
    "has_family",
    "has_head",
    "ranks_texts",
    "read_config",
    "supported_families",
]


_WITH_HEAD: Final = "ForCausalLM"


@frozen(kw_only=True)
class ExpertNames:
    """Names the tensors of a mixture of experts in a checkpoint.

    :ivar block: the name, within a layer, under which its router and its ``experts`` are
    :ivar router: the name of the router's matrix there
    :ivar gate: the name of the gate's matrix within one expert; ``up`` and ``down`` likewise
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@frozen(kw_only=True)
class NormNames:
    """Names the norms of a model in a checkpoint.

    :ivar attention: the norm before attention, within a layer
    :ivar attention_output: the norm of what attention gives, where there is one
    :ivar mlp: the norm before the MLP, which llama names after what it follows
    :ivar mlp_output: the norm of what the MLP gives, where there is one
    :ivar query: the norm of queries, where there is one; ``key`` likewise
    :ivar beside: the norms before attention and before the MLP where both read the residual stream
    :ivar embedding: the norm of the embeddings, within the body
    :ivar last: the norm before the output projection
    """

    attention: str = "input_layernorm"
    attention_output: str = "post_attention_layernorm"
    mlp: str = "post_attention_layernorm"
    mlp_output: str = "post_feedforward_layernorm"
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    beside: tuple[str, str] = ("ln_attn", "ln_mlp")
    embedding: str = "word_embeddings_layernorm"
    last: str = "norm"


@frozen(kw_only=True)
class TensorNames:
    """Names the tensors of a model in a checkpoint.

    :ivar body: the prefix of the decoder's tensors
    :ivar embedding: the token embeddings, within the body
    :ivar layers: what the layers are numbered under, within the body
    :ivar head: the output projection, where it is not tied to the embeddings
    :ivar qkv: the projections within a layer whose rows are queries, keys and values, one after the other where there
        are three of them, as the config says in one
    :ivar output: the projection of what attention gives, within a layer
    :ivar gate_up: the projections of a gated MLP whose rows, one after the other, are gate and up
    :ivar up: the first projection of an MLP without a gate
    :ivar down: the last projection of an MLP
    :ivar experts: the names that mixtures of experts may have; the first whose router is in the checkpoint is used
    """

    body: str = "model."
    embedding: str = "embed_tokens"
    layers: str = "layers"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norms: NormNames = NormNames()
    experts: tuple[ExpertNames, ...] = (ExpertNames(),)

    @property
    def table(self) -> str:
        """Return the tensor of the token embeddings."""
        return f"{self.body}{self.embedding}.weight"

    def layer(self, index: int) -> str:
        """Return what the names of one layer's tensors start with."""
        return f"{self.body}{self.layers}.{index}."


@frozen(kw_only=True)
class Sizes:
    """Holds the shape that transformers' config of a family has where nothing is said.

    A model's own config.json states these numbers. Where the decoder is a section of another model's, transformers
    leaves out those that are as here: LLaVA 1.5's section, of a Vicuna of 7 billion parameters, has the vocabulary
    alone.
    """

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int

    def complete(self, section: ConfigFields) -> ConfigFields:
        """Return a section with what it leaves out."""
        return section.with_defaults(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
        )


@frozen(kw_only=True)
class DecoderFamily:
    """Describes what is specific to a family; each family's file holds one, as ``FAMILY``.

    :ivar architectures: Hugging Face's names of the ``architectures`` that generate text with this decoder
    :ivar read: makes the decoder's shape from config.json
    :ivar names: what checkpoints call their tensors: the first whose embeddings are in the checkpoint are used
    :ivar sizes: what a config may leave out that is a section of another model's; None: ``read`` knows it
    """

    architectures: tuple[str, ...]
    read: Callable[[ConfigFields], DecoderConfig]
    names: tuple[TensorNames, ...] = (TensorNames(),)
    sizes: Sizes | None = None

    def read_section(self, section: ConfigFields) -> DecoderConfig:
        """Make the decoder's shape from a section of another model's config, which states what is not as usual."""
        return self.read(section if self.sizes is None else self.sizes.complete(section))

    @property
    def bodies(self) -> tuple[str, ...]:
        """Return Hugging Face's names of the classes that are such a decoder without an output projection."""
        return self._named("Model", "TextModel")

    @property
    def rankers(self) -> tuple[str, ...]:
        """Return Hugging Face's names of the classes that make numbers of what such a decoder says of a text."""
        return self._named("ForSequenceClassification", "TextForSequenceClassification")

    def _named(self, *ends: str) -> tuple[str, ...]:
        stems = [each.removesuffix(_WITH_HEAD) for each in self.architectures if each.endswith(_WITH_HEAD)]
        return tuple(f"{stem}{end}" for stem in stems for end in ends)


@frozen(kw_only=True)
class NestedFamily:
    """Describes a family that puts an image encoder before a decoder of another family; each has one, as ``FAMILY``.

    :ivar architectures: as :class:`DecoderFamily` has them
    :ivar text: which section of config.json is the decoder's
    :ivar text_type: the decoder's ``model_type`` where that section does not say it
    :ivar places: the prefix of the decoder's tensors, and the name of its output projection, in each of the forms that
        checkpoints have
    :ivar ties: whether the output projection is the embeddings where no section says so
    :ivar adapt: changes the decoder's shape by what the whole config says
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

    def resolve(self, fields: ConfigFields, families: Mapping[str, AnyFamily]) -> DecoderFamily:
        """Return the decoder's family, as it is within this one.

        :raises UnsupportedArchitectureError: the decoder is of none that is supported
        """
        name = self._section(fields).text("model_type")
        inner = families.get(name)
        if not isinstance(inner, DecoderFamily):
            known = [each for each, family in families.items() if isinstance(family, DecoderFamily)]
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
            names=tuple(evolve(each, body=body, head=head) for each in inner.names for body, head in self.places),
        )

    def _section(self, fields: ConfigFields) -> ConfigFields:
        """Return the decoder's fields; in older configs they stand beside the encoder's section."""
        own = fields.section(self.text)
        if own.values():
            return own.with_defaults(model_type=self.text_type)
        return ConfigFields({**fields.values(), "model_type": self.text_type})


AnyFamily: TypeAlias = DecoderFamily | NestedFamily


def supported_families() -> dict[str, AnyFamily]:
    """Return every family by ``model_type``, in order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(paged_sdk.models.__path__))
    found = {name: getattr(import_module(f"{paged_sdk.models.__name__}.{name}"), "FAMILY", None) for name in modules}
    return {name: family for name, family in found.items() if isinstance(family, AnyFamily)}


def has_family(config: Mapping[str, Any]) -> bool:
    """Say whether a family has the checkpoint's ``model_type``.

    :param config: config.json's content
    """
    return ConfigFields(config).text("model_type", "") in supported_families()


def find_family(config: Mapping[str, Any]) -> DecoderFamily:
    """Find the family of a checkpoint. One without an output projection has that of its embeddings, so that all else
    is as usual; :func:`has_head` says which it is.

    :param config: config.json's content
    :raises UnsupportedArchitectureError: there is none, or the checkpoint is for another task
    """
    families = supported_families()
    fields = ConfigFields(config)
    model_type = fields.text("model_type", "")
    family = families.get(model_type)
    if family is None:
        raise UnsupportedArchitectureError(
            f"model_type {shown(model_type)} is not supported: expected one of {', '.join(families)}",
            architecture=model_type,
            supported=families,
        )
    if fields.is_set("per_layer_config"):
        raise UnsupportedArchitectureError(
            f"{fields.shown('per_layer_config')} is not supported: all layers have one shape",
            architecture=model_type,
            supported=families,
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
    return family.resolve(fields, families) if isinstance(family, NestedFamily) else family


def _is_among(classes: Collection[str], named: Collection[str]) -> bool:
    """Say whether a config names one of some classes. The first checkpoints of a family name their makers' own, which
    transformers writes with other capitals since: PhiMoEForCausalLM, MPTForCausalLM.
    """
    return not {name.lower() for name in classes}.isdisjoint(name.lower() for name in named)


def _with_tied_head(family: DecoderFamily) -> DecoderFamily:
    return evolve(family, read=lambda fields: evolve(family.read(fields), tie_embeddings=True, head_bias=False))


def has_head(config: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint of a family has an output projection, of its own or tied: its class says so.

    :param config: config.json's content
    """
    return not _is_one_of(config, lambda family: (*family.bodies, *family.rankers))


def ranks_texts(config: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint of a family has layers in the output projection's place that make numbers of a text.

    :param config: config.json's content
    """
    return _is_one_of(config, lambda family: family.rankers)


def _is_one_of(config: Mapping[str, Any], classes: Callable[[DecoderFamily], Collection[str]]) -> bool:
    fields = ConfigFields(config)
    family = supported_families().get(fields.text("model_type", ""))
    return isinstance(family, DecoderFamily) and _is_among(classes(family), fields.texts("architectures"))


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the shape of a checkpoint's decoder.

    :param config: config.json's content
    :raises UnsupportedArchitectureError: see :func:`find_family`
    :raises CheckpointError: a value that is missing or cannot be used
    """
    return find_family(config).read(ConfigFields(config))
