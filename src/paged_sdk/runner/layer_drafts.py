"""Drafts with layers that read the hidden states of the model's steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import Final, Generic, TypeVar

import torch

from paged_sdk.runner.beside_layers import MOST_DRAFTS, BesideLayers
from paged_sdk.runner.computed_step import ComputedStep
from paged_sdk.runner.drafted_model import DraftedModel
from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.runner.first_pause import FirstPause
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.draft_counts import draft_counts
from paged_sdk.types.step import StepRow

__all__ = ["LayerDrafts"]

PRIORS: Final = (0.85, 0.75, 0.65, 0.55)
"""Prior acceptance rates of the first draft, of the second if the first is right, and so on: less than a user of vLLM
saw of Qwen3.6-27B (0.92, 0.91, 0.77, 0.83), since small models are right less often."""

StateT = TypeVar("StateT", bound=DraftedText)
LayersT = TypeVar("LayersT", bound=BesideLayers)


class LayerDrafts(ABC, Generic[LayersT, StateT]):
    """Drafts with layers beside a model.

    Drafts are the likeliest tokens: see :class:`~paged_sdk.runner.draft_model.DraftModel`. Their number depends on how
    many were right, and on the measured times of the model's steps and of the layers'.

    :param layers: the layers, with their model
    :param model: describes the model
    """

    def __init__(self, layers: LayersT, model: DraftedModel) -> None:
        self._layers: LayersT | None = layers
        self._vocab_size = model.vocab_size
        self._gamma = min(model.gamma, MOST_DRAFTS)
        self._max_tokens = model.max_tokens
        self._times = model.times
        self._own_times = StepTimes()
        self._balance = model.balance
        self._acceptance = Acceptance(priors=PRIORS)
        self._first_pause = FirstPause()
        self._states: dict[int, StateT] = {}
        self._has_failed = False

    @property
    def num_followed(self) -> int:
        """Return the number of sequences that have state here."""
        return len(self._states)

    @property
    def layers(self) -> LayersT:
        """Return the layers, whose KV is to be copied and freed with the model's."""
        assert self._layers is not None, "weights are being made anew"
        return self._layers

    def let_go(self) -> None:
        """Drop the layers, the model and all states, until :meth:`hold`."""
        self._layers = None
        self._drop_states()

    def hold(self, layers: LayersT) -> None:
        """Take other layers, of the same kind and shape, with their model."""
        self._layers = layers
        self._own_times.clear()

    @abstractmethod
    def ask(self, rows: Iterable[StepRow]) -> None:
        """Have the model compute the hidden states that :meth:`take` needs of a step."""

    @abstractmethod
    def take(self, step: ComputedStep) -> None:
        """Take the hidden states that a step has computed, where they were needed or :meth:`ask` has asked for them."""

    def propose(self, sequences: Sequence_[Sequence]) -> list[list[int]]:
        """Propose drafts for each sequence, as many as are expected to pay."""
        states = [self._states.get(sequence.seq_id) for sequence in sequences]
        followed = [state for state in states if state is not None]
        for state in followed:
            state.compare()
            self._shorten(state)
        if not followed or not self._balance.allows:
            return [[] for _ in states]
        chances = [state.chances(self._most_drafts(state)) for state in followed]
        counts = draft_counts(
            chances,
            self._times.expected,
            self._balance.left,
            lambda ahead: ahead * self._own_times.expected(len(followed)),
        )
        chosen = [
            state
            for state, count, chance in zip(followed, counts, chances, strict=True)
            if chance and state.choose(count)
        ]
        start = time.monotonic()
        if chosen:
            try:
                with torch.inference_mode():
                    for state in chosen:
                        state.follow_grammar()
                    self._draft(chosen)
            except BaseException:
                self._has_failed = True  # nobody asks again
                self._drop_states()
                raise
        self._balance.claim((state.sequence.seq_id for state in chosen), time.monotonic() - start)
        return [[] if state is None else state.drafts for state in states]

    @abstractmethod
    def _shorten(self, state: StateT) -> None:
        """Drop what was computed of drafts that were wrong."""

    @abstractmethod
    def _is_ready(self, state: StateT) -> bool:
        """Return whether the model's hidden state at the token before a sequence's last one is here."""

    @abstractmethod
    def _draft(self, states: list[StateT]) -> None:
        """Draft tokens, one per sequence and run of the layers."""

    def _add(self, states: Sequence_[StateT], tokens: Sequence_[int], start: float) -> list[int]:
        """Append a draft to each text, and return the places of those that want more.

        :param start: when the run of the layers began that made these drafts
        """
        self._own_times.note(len(states), time.monotonic() - start)
        for state, token in zip(states, tokens, strict=True):
            state.add(token, self._vocab_size)
        return [place for place, state in enumerate(states) if len(state.drafts) < state.num_wanted]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def reset(self) -> None:
        """Do nothing: no text that has ended is remembered."""

    def _drop_states(self) -> None:
        self._states.clear()

    def _most_drafts(self, state: StateT) -> int:
        """Return the maximum number of drafts for a sequence. The target adds one token after the last draft."""
        if not self._is_ready(state):
            return 0
        num_tokens = len(state.sequence.token_ids)
        return min(self._gamma, state.sequence.max_length - num_tokens - 1, self._max_tokens - num_tokens)
