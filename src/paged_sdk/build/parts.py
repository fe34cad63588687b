"""Holds what building a model gives: an engine, and the limits that requests are checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.isq import IsqType
from paged_sdk.engine.engine import Engine
from paged_sdk.types.adapter import AdapterUse

if TYPE_CHECKING:  # they need torch, which is loaded when a model is built
    from paged_sdk.adapters.bank import AdapterBank
    from paged_sdk.vision.processor import ImagePrompts

__all__ = ["ModelParts"]


@frozen(kw_only=True)
class ModelParts:
    """Holds everything that :class:`paged_sdk.Model` is made of.

    :ivar name: the model's name in responses
    :ivar model_type: the checkpoint's, and
    :ivar architecture: the decoder's ``model_type``
    :ivar engine: the engine, which has not made a step yet
    :ivar text: the model's tokenizer, chat template and defaults
    :ivar config: the engine's settings, all filled in
    :ivar vocab_size: how many logits a token has
    :ivar max_sequence_tokens: of how many tokens the KV pool holds keys and values for one sequence
    :ivar hidden_size: how many numbers a hidden state has
    :ivar recipe: how its texts become vectors
    :ivar why_no_text: why it cannot generate text, and what it does; None: it can
    :ivar reads_whole_texts: whether its tokens attend to later ones, too
    :ivar heals_tokens: whether the end of a text that is to be continued may be tokenized anew, with what follows
    :ivar images: puts images into prompts; None: the model takes none
    :ivar on_worker_start: called first on the worker thread
    :ivar check_isq: raises a ``ConfigError`` for a type that the weights cannot be quantized to; None: there are none
    :ivar log_throughput: whether to log a line of figures every few seconds of work
    :ivar bank: keeps the model's adapters; None: the model can have none
    :ivar adapters: those that were loaded with it, by name
    """

    name: str
    model_type: str
    architecture: str
    engine: Engine
    text: TextProcessor
    config: EngineConfig
    vocab_size: int
    max_sequence_tokens: int
    hidden_size: int
    recipe: EmbeddingRecipe = field(factory=EmbeddingRecipe)
    why_no_text: str | None = None
    reads_whole_texts: bool = False
    heals_tokens: bool = False
    images: ImagePrompts | None = None
    on_worker_start: Callable[[], None] | None = None
    check_isq: Callable[[IsqType], None] | None = None
    log_throughput: bool = False
    bank: AdapterBank | None = None
    adapters: Mapping[str, AdapterUse] = field(factory=dict)
