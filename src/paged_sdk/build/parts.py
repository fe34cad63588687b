"""Holds the result of building a model: the engine, and what is needed to check and make requests."""

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

if TYPE_CHECKING:  # these import torch, which is loaded when a model is built
    from paged_sdk.adapters.bank import AdapterBank
    from paged_sdk.vision.processor import ImagePrompts

__all__ = ["ModelParts"]


@frozen(kw_only=True)
class ModelParts:
    """Holds everything that :class:`paged_sdk.Model` is made of.

    :ivar name: the model's name in responses
    :ivar model_type: the checkpoint's ``model_type``
    :ivar architecture: the decoder's ``model_type``
    :ivar engine: the engine, before its first step
    :ivar text: the model's tokenizer, chat template and defaults
    :ivar config: the engine's resolved settings
    :ivar vocab_size: number of logits per token
    :ivar max_sequence_tokens: maximum number of tokens of one sequence that the KV pool can hold
    :ivar hidden_size: size of a hidden state
    :ivar recipe: how the model embeds and ranks texts
    :ivar why_no_text: why the model cannot generate text, and what it does instead; None: it generates text
    :ivar is_bidirectional: whether attention is bidirectional
    :ivar heals_tokens: whether the last tokens of a prompt may be replaced by ones that also cover the start of the
        completion
    :ivar images: inserts images into prompts; None: the model accepts no images
    :ivar on_worker_start: called first on the worker thread
    :ivar check_isq: raises a ``ConfigError`` for a type that the weights cannot be quantized to; None: the model has no
        weights to quantize
    :ivar log_throughput: whether to log throughput every few seconds of work
    :ivar bank: holds the model's adapters; None: the model supports no adapters
    :ivar adapters: the adapters loaded with the model, by name
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
    is_bidirectional: bool = False
    heals_tokens: bool = False
    images: ImagePrompts | None = None
    on_worker_start: Callable[[], None] | None = None
    check_isq: Callable[[IsqType], None] | None = None
    log_throughput: bool = False
    bank: AdapterBank | None = None
    adapters: Mapping[str, AdapterUse] = field(factory=dict)
