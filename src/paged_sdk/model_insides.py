"""Holds the components behind a model's public interface, wherever its engine runs."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from paged_sdk.build.parts import ModelParts
from paged_sdk.calls.loaded_adapters import Adapters, LoadedAdapters
from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.isq import IsqType
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.worker import Worker

__all__ = ["ModelInsides"]


@frozen(kw_only=True)
class ModelInsides:
    """Holds the components behind a model's public interface.

    :ivar preparer: checks requests and prepares them for the engine
    :ivar worker: takes the prepared requests
    :ivar recipe: the checkpoint's settings for embeddings and ranking; for ``hidden_size`` and ``check_isq`` see
        :class:`ModelParts`
    """

    name: str
    model_type: str
    architecture: str
    preparer: RequestPreparer
    worker: EngineAccess
    adapters: Adapters
    recipe: EmbeddingRecipe
    hidden_size: int
    check_isq: Callable[[IsqType], None] | None

    @classmethod
    def of(cls, parts: ModelParts) -> ModelInsides:
        """Start a worker thread for an engine, and return the components of its model."""
        preparer = RequestPreparer(
            text=parts.text,
            config=parts.config,
            vocab_size=parts.vocab_size,
            max_sequence_tokens=parts.max_sequence_tokens,
            why_no_text=parts.why_no_text,
            is_bidirectional=parts.is_bidirectional,
            heals_tokens=parts.heals_tokens,
            images=parts.images,
        )
        # Only the worker refers to the engine, so that the tensors are freed when its thread ends.
        worker = Worker(parts.engine, on_start=parts.on_worker_start, log_throughput=parts.log_throughput)
        return cls(
            name=parts.name,
            model_type=parts.model_type,
            architecture=parts.architecture,
            preparer=preparer,
            worker=worker,
            adapters=LoadedAdapters(worker, parts.bank, parts.adapters),
            recipe=parts.recipe,
            hidden_size=parts.hidden_size,
            check_isq=parts.check_isq,
        )
