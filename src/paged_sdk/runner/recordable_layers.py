"""Runs a model's layers with device operations only, so that a step can be recorded."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import DecodeBackend
from paged_sdk.kernels.lora_slots import AdapterSlots, SlotRows
from paged_sdk.kernels.step import AttentionStep, StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.step_results import StepResults

__all__ = ["RecordableLayers"]


@frozen(eq=False)
class RecordableLayers:
    """Holds what all recorded steps of a model share.

    :ivar results: tensors to which steps write their results, and from which they read the tokens that the previous
        step sampled
    :ivar slots: table in which steps find the adapters of their tokens; None: no adapters
    """

    model: CausalModel
    backend: DecodeBackend
    results: StepResults
    slots: AdapterSlots | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.results.overlap.device

    def host_input(self, *shape: int) -> Tensor:
        """Allocate an int64 host tensor for a step's input, pinned on CUDA: one copy sends it to the device."""
        return torch.empty(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def forward(
        self, token_ids: Tensor, positions: Tensor, sources: Tensor, places: Tensor, attention: AttentionStep
    ) -> Tensor:
        """Return the hidden states of tokens. Shapes depend only on the number of tokens.

        :param token_ids: token ids; ignored where ``sources`` is not -1
        :param positions: their positions; -1: padding
        :param sources: index of each token among the tokens that the previous step sampled; -1: take ``token_ids``
        :param places: slot of each token's adapter; -1: none
        """
        awaited = self.results.overlap.index_select(0, sources.clamp(min=0))
        slots = None if self.slots is None else SlotRows(self.slots, places)
        context = StepContext(attention=attention, slots=slots)
        return self.model.forward(token_ids.where(sources < 0, awaited), positions.clamp(min=0), context)
