"""What building a model gives: an engine, and what an application's requests are checked against."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.engine import EngineConfig
from paged_sdk.engine.engine import Engine

__all__ = ["ModelParts"]


@frozen(kw_only=True)
class ModelParts:
    """Everything that :class:`paged_sdk.Model` puts to work.

    :ivar name: shown in responses
    :ivar architecture: the decoder's ``model_type``
    :ivar engine: not yet stepped by anyone
    :ivar text: the model's tokenizer, chat template and defaults
    :ivar config: the engine's settings, with nothing left open
    :ivar vocab_size: rows of the logits
    :ivar max_prompt_tokens: the longest prompt that fits context and KV pool
    :ivar on_worker_start: run first on the worker thread
    :ivar log_throughput: log a line of figures every few seconds of work
    """

    name: str
    architecture: str
    engine: Engine
    text: TextProcessor
    config: EngineConfig
    vocab_size: int
    max_prompt_tokens: int
    on_worker_start: Callable[[], None] | None = None
    log_throughput: bool = False
