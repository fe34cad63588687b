"""Describes how a tiny model is built."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, evolve, frozen

import tiny
from adapter_files import ALL, write_adapter
from assistant_checkpoints import make_assistant
from combinations.families import (
    OTHERS,
    RECURRENT,
    STATEFUL,
    VISION,
    WITH_ASSISTANT,
    WITH_MTP,
    is_fused,
    make_checkpoint,
)
from drafting import FreeSteps, NoDrafts, drafting, drafting_model
from paged_sdk import (
    IsqType,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    VisionModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.engine.engine import Engine
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.scheduler.draft_account import DraftAccount
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.speculative.forced_tokens import ForcedTokens
from paged_sdk.speculative.several_proposers import SeveralProposers

__all__ = ["RANKING_TOKENS", "AdapterContent", "Checkpoints", "Configuration", "build_model", "layer_drafts_of"]

_DTYPES: Final = ("float32", "bfloat16", "float16")
_TYPES: Final = ("Q4_0", "Q5_1", "Q8_0", "Q4K", "Q6K", "HQQ4", "AFQ4", "FP8", "NF4", "INT8")
_WIDE: Final = {"hidden_size": 256, "intermediate_size": 256}
"""Blocks of 256 weights need rows that are as long; narrower ones are quantized to another type."""
_HEADS_OF_32: Final = {"hidden_size": 128, "head_dim": 32}
"""4-bit keys and values have scales of 32 elements."""
_PROPOSERS: Final = (
    "forced tokens",
    "suffix",
    "itself",
    "itself",
    "another model",
    "a larger vocabulary",
    "all of them",
)
_MTP: Final = "its own layer"
_ASSISTANT: Final = "an assistant"
_OF_HEAD: Final = "of the head"
_OF_EMBEDDINGS: Final = "of the embeddings"
_ADAPTER_KINDS: Final = ("plain", "decomposed", "small", "activated", _OF_HEAD, _OF_EMBEDDINGS)
_CONTIGUOUS: Final = "contiguous"

RANKING_TOKENS: Final = ("a", "e")
_TEMPLATE: Final = "{# passes any role on, 'query' and 'document', too #}" + tiny.CHAT_TEMPLATE

INVOCATION: Final = (77, 78)
"""The tokens from whose last occurrence in a prompt on an activated adapter changes what comes."""


@frozen
class AdapterContent:
    """Says what is in an adapter.

    :ivar kind: one that are computed each in a way of its own
    """

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}"

    @property
    def is_exact(self) -> bool:
        """Tell whether its bits depend on its own row alone: torch multiplies updates of the output projection."""
        return self.kind != _OF_HEAD

    @classmethod
    def draw(cls, rng: random.Random) -> AdapterContent:
        return cls(rng.choice(_ADAPTER_KINDS), rng.randrange(3))

    def write(self, directory: Path, configuration: Configuration) -> Path:
        model = tiny.build_model(configuration.family, **configuration.overrides)
        match self.kind:
            case "decomposed":
                return write_adapter(directory, model, seed=self.seed, strength=0.1, use_dora=True)
            case "small":
                return write_adapter(directory, model, seed=self.seed, rank=2, targets=("o_proj", "down_proj"))
            case "activated":
                invocation = list(INVOCATION)
                return write_adapter(directory, model, seed=self.seed, alora_invocation_tokens=invocation)
            case kind if kind == _OF_EMBEDDINGS:
                targets = ("embed_tokens", "k_proj")
                return write_adapter(directory, model, seed=self.seed, strength=0.3, targets=targets)
            case kind if kind == _OF_HEAD:
                return write_adapter(directory, model, seed=self.seed, strength=0.3, targets=("lm_head", "q_proj"))
        return write_adapter(directory, model, seed=self.seed, targets=ALL)


@frozen(kw_only=True)
class Configuration:
    """Holds what is drawn of a model.

    :ivar weights: a dtype, or what the weights are quantized to while loading
    :ivar is_wide: whether rows are long enough for blocks of 256 weights
    :ivar cache: "auto", "f8e4m3" or "q4" of a pool of blocks, or "contiguous"
    :ivar num_longest: how many texts of the longest kind the pool has room for
    :ivar budget: the most tokens of one step
    :ivar proposer: who guesses tokens
    """

    family: str
    weights: str
    is_wide: bool
    cache: str
    block_size: int
    num_longest: float
    has_prefix_cache: bool
    is_stored: bool
    budget: int
    max_num_seqs: int
    max_model_len: int
    max_slowdown: float
    proposer: str
    gamma: int
    num_threads: int
    heals: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Configuration:
        family = rng.choice((*tiny.FAMILIES, rng.choice(VISION), *rng.sample(tuple(OTHERS), 2)))
        cache = rng.choice(("auto", "auto", "f8e4m3", "q4", _CONTIGUOUS))
        if cache == "q4" and family not in (*tiny.FAMILIES, *RECURRENT):  # whose heads have 16 elements
            cache = "f8e4m3"
        if family == "mamba2" and cache != _CONTIGUOUS:  # it has no attention
            cache = "auto"
        # Without one arithmetic for every row count, coarser numbers would turn other last bits into other tokens.
        is_coarse = cache != _CONTIGUOUS and is_fused(family)
        weights = rng.choice((*_DTYPES, *rng.sample(_TYPES, 3))) if is_coarse else "float32"
        has_prefix_cache = rng.random() < 0.75
        own = _MTP if family in WITH_MTP else _ASSISTANT if family in WITH_ASSISTANT else None
        proposer = rng.choice(_PROPOSERS if own is None else (*_PROPOSERS, *[own] * 4))
        stores = cache != _CONTIGUOUS and family not in STATEFUL
        return cls(
            family=family,
            weights=weights,
            is_wide=weights.endswith("K") and family not in VISION,
            cache=cache,
            block_size=rng.choice((4, 4, 8, 16, 32)),
            num_longest=rng.choice((1.0, 1.0, 1.0, 1.3, 2.0, 20.0)),
            has_prefix_cache=has_prefix_cache,
            is_stored=has_prefix_cache and stores and rng.random() < 0.4,
            budget=rng.choice((8, 17, 40, 70, 512)),
            max_num_seqs=rng.choice((1, 3, 8, 8, 12)),
            max_model_len=rng.choice((72, 100, 160)),
            max_slowdown=rng.choice((0.0, 0.0, 3.0)),
            proposer=proposer,
            gamma=rng.choice((1, 3, 7)),
            num_threads=rng.choice((1, 1, 1, 2)),
            heals=rng.random() < 0.2,
        )

    @property
    def takes_images(self) -> bool:
        return self.family in VISION

    @property
    def takes_adapters(self) -> bool:
        return self.family in tiny.FAMILIES

    @property
    def ranks(self) -> bool:
        """Tell whether documents are ranked by what the model answers."""
        return self.family not in VISION

    @property
    def is_exact(self) -> bool:
        """Tell whether all bits of an answer are promised, whatever is computed beside it."""
        return self.cache != _CONTIGUOUS and is_fused(self.family)

    @property
    def overrides(self) -> dict[str, Any]:
        """Return in what the model's config departs from the family's."""
        of_heads = dict(_HEADS_OF_32) if self.cache == "q4" else {}
        of_states = {"num_heads": 32} if self.family == "mamba2" and self.is_wide else {}
        return of_heads | of_states | (dict(_WIDE) if self.is_wide else {})

    def plain(self) -> Configuration:
        """Return the one with room for everything, in which nothing is cached, cut or guessed."""
        return evolve(
            self,
            num_longest=30.0,
            has_prefix_cache=False,
            is_stored=False,
            budget=512,
            max_slowdown=0.0,
            proposer="none",
            num_threads=1,
        )

    def simpler(self) -> list[Configuration]:
        """Return this one with one of its settings each as it is in the plain one."""
        own, plain = asdict(self), asdict(self.plain())
        changes = [{name: value} for name, value in plain.items() if own[name] != value]
        for change in changes:
            if "has_prefix_cache" in change:
                change["is_stored"] = False
        others: list[dict[str, object]] = [
            {"family": "llama", "is_wide": False},
            {"weights": "float32", "is_wide": False},
            {"cache": "auto"},
            {"heals": False},
            {"proposer": own["proposer"] if own["proposer"] == "none" else "suffix"},
        ]
        changes += [change for change in others if any(own[name] != value for name, value in change.items())]
        return [Configuration(**(own | change)) for change in changes]

    def builder(self, checkpoints: Checkpoints) -> TextModelBuilder | VisionModelBuilder:
        make = VisionModelBuilder if self.takes_images else TextModelBuilder
        builder = make(checkpoints.base(self)).with_force_cpu().with_num_threads(self.num_threads)
        builder = builder.with_max_model_len(self.max_model_len).with_max_num_batched_tokens(self.budget)
        builder = builder.with_max_num_seqs(self.max_num_seqs).with_max_slowdown(self.max_slowdown)
        if (
            self.cache != _CONTIGUOUS or self.family not in STATEFUL
        ):  # else there is none, and asking for one is refused
            builder = builder.with_prefix_cache_n(16 if self.has_prefix_cache else None)
        quantized = self.weights not in _DTYPES
        builder = builder.with_isq(IsqType.parse(self.weights)) if quantized else builder.with_dtype(self.weights)
        if self.ranks:
            builder = builder.with_ranking_tokens(*RANKING_TOKENS).with_chat_template(_TEMPLATE)
        if self.heals:
            builder = builder.with_token_healing()
        if self.proposer == _MTP:
            builder = builder.with_speculation(SpeculativeConfig(gamma=self.gamma, mtp=True))
        if self.cache == _CONTIGUOUS:
            return builder.without_paged_attn()
        num_blocks = -(-self.max_model_len // self.block_size)
        tokens = MemoryGpuConfig.ContextSize(int(num_blocks * self.num_longest) * self.block_size)
        kind = PagedCacheType(self.cache)
        meta = PagedAttentionMeta(block_size=self.block_size, gpu_memory=tokens, cache_type=kind)
        if self.is_stored:
            builder = builder.with_prefix_cache_dir(checkpoints.stored)
        builder = builder.with_paged_attn(meta)
        return builder.with_batch_invariance() if self.is_exact else builder

    def make_proposer(self, checkpoints: Checkpoints) -> Proposer:
        """Make who guesses, by no clock."""
        match self.proposer:
            case "none":
                return NoDrafts()
            case "forced tokens":
                return ForcedTokens(NoDrafts())
            case "suffix" | "its own layer" | "an assistant":
                return ForcedTokens(drafting(self.gamma))
            case "itself" if not self.takes_images:
                drafter = checkpoints.base(self)
            case "a larger vocabulary":
                drafter = checkpoints.drafter(vocab_size=tiny.VOCAB_SIZE + 64)
            case _:
                drafter = checkpoints.drafter()
        own = TextModelBuilder(drafter).with_force_cpu().with_dtype("float32").with_num_threads(self.num_threads)
        model = drafting_model(self.builder(checkpoints), drafter, self.gamma, settings=own.settings)
        if self.proposer == "all of them":
            return SeveralProposers((ForcedTokens(drafting(self.gamma)), model))
        return model


def build_model(
    configuration: Configuration,
    checkpoints: Checkpoints,
    adapters: Mapping[str, AdapterContent],
    proposer: Proposer,
) -> Model:
    """Build the model of a configuration.

    :raises PagedError: there is no such model
    """
    builder = configuration.builder(checkpoints)
    for name, content in adapters.items():
        builder = builder.with_adapter(checkpoints.adapter(content, configuration), name=name)
    settings = builder.settings
    if configuration.proposer == _ASSISTANT:
        assistant = TextModelBuilder(checkpoints.assistant(configuration))
        config = SpeculativeConfig(gamma=configuration.gamma)
        settings = TextSpeculativeBuilder(builder, assistant, config).settings
    parts = load_parts(builder.source, settings, read_environment({}), proposer=proposer)
    if (layers := layer_drafts_of(parts.engine)) is not None:
        # What the text has no draft for, the layers draft, whatever that costs.
        layers._times, layers._balance = FreeSteps(), DraftAccount(FreeSteps()).open_balance()
        parts.engine._proposer = SeveralProposers((proposer, layers))
    return Model(parts)


def layer_drafts_of(engine: Engine) -> LayerDrafts[Any, Any] | None:
    """Return what drafts with layers beside the model: its own for multi-token prediction, or an assistant's."""
    runner: Any = engine._runner
    found: LayerDrafts[Any, Any] | None = runner._step_runner.drafts
    return found


class Checkpoints:
    """Writes the checkpoints and adapters that configurations need, each once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def stored(self) -> Path:
        """Return the directory in which prefix caches are kept, by all models that have one."""
        return self._directory / "stored"

    def base(self, configuration: Configuration) -> Path:
        """Return the checkpoint of a configuration's model."""
        kind = "-wide" * configuration.is_wide + "-q4" * (configuration.cache == "q4")
        directory = self._directory / f"{configuration.family}{kind}"
        if not directory.exists():
            make_checkpoint(configuration.family, directory, **configuration.overrides)
        return directory

    def assistant(self, configuration: Configuration) -> Path:
        """Return the assistant of a configuration's model."""
        target = self.base(configuration)
        directory = self._directory / f"assistant-of-{target.name}"
        return directory if directory.exists() else make_assistant(target, directory)

    def drafter(self, vocab_size: int = tiny.VOCAB_SIZE) -> Path:
        """Return a model that guesses otherwise."""
        directory = self._directory / f"drafter-{vocab_size}"
        if not directory.exists():
            sizes: dict[str, Any] = {"vocab_size": vocab_size, "num_hidden_layers": 1, "head_dim": 32}
            tiny.make_checkpoint("llama", directory, seed=1, **sizes)
        return directory

    def adapter(self, content: AdapterContent, configuration: Configuration) -> Path:
        """Return an adapter of a configuration's model."""
        base = self.base(configuration).name
        directory = self._directory / f"{base}-{content.kind.replace(' ', '-')}-{content.seed}"
        return directory if directory.exists() else content.write(directory, configuration)
