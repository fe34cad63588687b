"""Make proposers whose choice depends on no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from attrs import evolve

from paged_sdk import TextModelBuilder, VisionModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.draft import make_draft_model
from paged_sdk.build.loaded_model import load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import read_environment
from paged_sdk.runner.draft_model import DraftModel
from paged_sdk.scheduler.draft_account import DraftAccount
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.text_proposer import TextProposer


class FreeSteps(StepTimes):
    """Expects every step to take as long, so that every draft pays."""

    def expected(self, num_tokens: int) -> float:
        return 1.0


class NoTime(StepTimes):
    """Expects every step to take none, so that nothing that it makes costs anything."""

    def expected(self, num_tokens: int) -> float:
        return 0.0


def drafting(
    gamma: int = 5, *, looks_back: bool = True, shares_texts: bool = True, times: StepTimes | None = None
) -> TextProposer:
    """Make a proposer that drafts whatever it can, up to ``gamma`` tokens for each text."""
    times = FreeSteps() if times is None else times
    return TextProposer(
        gamma, looks_back=looks_back, shares_texts=shares_texts, times=times, balance=DraftAccount(times).open_balance()
    )


def drafting_model(
    builder: TextModelBuilder | VisionModelBuilder,
    directory: Path,
    gamma: int = 5,
    *,
    settings: BuildSettings | None = None,
) -> DraftModel:
    """Make a checkpoint draft up to ``gamma`` tokens for each text of the model of a builder.

    :param settings: how the checkpoint is loaded; None: as the model is
    """
    environment = read_environment({})
    target = load_parts(builder.source, builder.settings, environment)
    target.engine.close()
    times = FreeSteps()
    devices = (torch.device("cpu"),)
    settings = settings or builder.settings
    draft = load_weights(Loading(path=directory, settings=settings, environment=environment, devices=devices))
    config = evolve(target.config, gamma=gamma)
    balance = DraftAccount(times).open_balance()
    drafts = make_draft_model(
        draft, config, target_vocab_size=target.vocab_size, times=times, balance=balance, workspace=None
    )
    drafts._own_times = NoTime()  # on a busy machine guesses took too long to pay, and some texts had none
    return drafts


class NoDrafts:
    """Lets every step give each text one token."""

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        return [[] for _ in sequences]

    def forget(self, seq_ids: Iterable[int]) -> None:
        pass

    def reset(self) -> None:
        pass
