"""Runs a model until it is closed, and replaces its weights by requantized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import frozen

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import EngineDeadError, ModelClosedError
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.fused_decoder import fused_spans
from paged_sdk.runner.beside_layers import BesideLayers, block_tensors_beside
from paged_sdk.runner.block_content import BlockContent
from paged_sdk.runner.block_files import BlockFiles
from paged_sdk.runner.device import return_cached_memory
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.image_vectors import ImageVectors
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.runner.other_ranks import OtherRanks
from paged_sdk.runner.output import PendingStep
from paged_sdk.runner.step_runner import StepRunner
from paged_sdk.runner.stored_blocks import StoredBlocks
from paged_sdk.sampling.processor import ALL_TOKENS
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.request import Request

__all__ = ["ModelRunner", "Requantized", "Requantizer"]


@frozen(kw_only=True)
class Requantized:
    """Holds the result of requantizing a runner's weights.

    :ivar block_files: where blocks of the KV cache are stored; None: nowhere
    :ivar beside: layers that draft from the model's hidden states; None: there are none
    :ivar error: why requantizing failed and the old weights were kept; None on success
    """

    model: CausalModel
    backend: AttentionBackend
    device_decoding: DeviceDecoding | None
    block_files: BlockFiles | None = None
    beside: BesideLayers | None = None
    error: Exception | None = None


class Requantizer(Protocol):
    """Quantizes a model's weights to another type."""

    def __call__(self, isq: IsqType, check_cancelled: Callable[[], None]) -> Requantized:
        """Requantize the weights; the caller must hold no other reference to them. See
        :meth:`paged_sdk.runner.output.Runner.requantize`.

        :raises Exception: requantizing failed, and the old weights could not be restored
        """
        ...


class ModelRunner:
    """Runs a model over the steps that a scheduler makes.

    :param backend: holds the KV, under the scheduler's ids
    :param sampler: samples on the host
    :param device_decoding: samples on the device where possible, so that steps overlap; None: all tokens are sampled on
        the host
    :param requantizer: quantizes the weights to another type; None: not supported
    :param adapters: the adapters of rows; None: no adapters
    :param images: provides the vectors of prompts' images; None: no images
    :param others: the other ranks of a tensor-parallel model; None: this process holds the whole model
    :param blocks: stores blocks of the KV cache; None: nothing is stored
    :param drafts: drafts with layers that follow the steps; None: nothing follows them
    """

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        sampler: Sampler,
        device_decoding: DeviceDecoding | None = None,
        requantizer: Requantizer | None = None,
        adapters: AdapterBank | None = None,
        images: ImageVectors | None = None,
        others: OtherRanks | None = None,
        blocks: StoredBlocks | None = None,
        drafts: LayerDrafts[Any, Any] | None = None,
    ) -> None:
        self._step_runner: StepRunner | None = StepRunner(
            model, backend, sampler, device_decoding, adapters, images, others, blocks, drafts
        )
        self._requantizer = requantizer

    @property
    def samples_on_device(self) -> bool:
        """Tell whether tokens are sampled on the device where possible."""
        return self._step_runner is not None and self._step_runner.device_decoding is not None

    def num_on_host(self, request: Request) -> int:
        """Return the number of first output tokens of a request that may be sampled on the host, as drafts require."""
        path = None if self._step_runner is None else self._step_runner.device_decoding
        return ALL_TOKENS if path is None else path.num_on_host(request)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Copy blocks, then compute and sample one step. Rows whose logits are not finite fail alone.

        :raises StepMemoryError: the step ran out of memory
        :raises ModelClosedError: after :meth:`close`
        """
        if self._step_runner is None:
            raise ModelClosedError("the runner is closed")
        with torch.inference_mode():
            return self._step_runner.submit(output)

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        """Implement :meth:`paged_sdk.runner.output.Runner.requantize`."""
        if self._step_runner is None or self._requantizer is None:
            raise ModelClosedError("the runner is closed")
        sampler, adapters = self._step_runner.sampler, self._step_runner.adapters
        images, others, blocks = self._step_runner.images, self._step_runner.others, self._step_runner.blocks
        drafts = self._step_runner.drafts
        if blocks is not None:
            blocks.let_go_of_pool()
        if drafts is not None:
            drafts.let_go()
        self._step_runner = None  # so that old weights are freed while new ones are made
        # Otherwise new weights would be allocated in pieces of the old KV pool, which leaves no contiguous memory for
        # the new pool, and the memory of recorded steps would stay cached and unused.
        return_cached_memory()
        try:
            made = self._requantizer(isq, check_cancelled)
        except Exception as error:
            _close(images, others, adapters, blocks)
            if isinstance(error, ModelClosedError):
                raise
            raise EngineDeadError(f"the weights could not be quantized again: {error!r}") from error
        if adapters is not None:
            adapters.hold(fused_spans(made.model))
        if blocks is not None and made.block_files is not None:
            blocks.replace(made.block_files, BlockContent(block_tensors_beside(made.backend, made.beside)))
        if drafts is not None and made.beside is not None:
            drafts.hold(made.beside)
        self._step_runner = StepRunner(
            made.model, made.backend, sampler, made.device_decoding, adapters, images, others, blocks, drafts
        )
        if made.error is not None:
            raise made.error

    def close(self) -> None:
        """Free weights, KV and sampler; a second call does nothing."""
        if self._step_runner is not None:
            _close(self._step_runner.images, self._step_runner.others, self._step_runner.adapters)
            _close(self._step_runner.blocks)
        self._step_runner = self._requantizer = None
        return_cached_memory()


def _close(*parts: ImageVectors | OtherRanks | AdapterBank | StoredBlocks | None) -> None:
    for part in parts:
        if part is not None:
            part.close()
