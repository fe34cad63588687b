"""Runs a model's layers by operations on the device alone, so that a step of them can be recorded."""

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
    """Holds what the steps of a model have in common, whose shapes do not depend on values of their input.

    :ivar results: what steps write their results to, and where they find the tokens that the previous one sampled
    :ivar slots: where steps find the adapters of their tokens; None: no token has one
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
        """Make memory on the host for a step's input, int64, from which one copy sends it to the device."""
        return torch.empty(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def forward(
        self, token_ids: Tensor, positions: Tensor, sources: Tensor, places: Tensor, attention: AttentionStep
    ) -> Tensor:
        """Return the hidden states of tokens.

        :param token_ids: the tokens, where the host knows them
        :param positions: their positions; -1: padding
        :param sources: index of each token among those that the previous step sampled; -1: the host knows it
        :param places: of the tokens' adapters in the slots; -1: a token has none
        """
        awaited = self.results.overlap.index_select(0, sources.clamp(min=0))
        slots = None if self.slots is None else SlotRows(self.slots, places)
        context = StepContext(attention=attention, slots=slots)
        return self.model.forward(token_ids.where(sources < 0, awaited), positions.clamp(min=0), context)
