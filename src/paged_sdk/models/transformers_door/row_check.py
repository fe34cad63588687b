"""Check that a class's tokens interact only in attention, and have the positions that they are given."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.rank_head import ClassRankHead
from paged_sdk.models.transformers_door.skeleton import refusal, untried
from paged_sdk.models.transformers_door.trial_attention import TrialAttention, are_alike

__all__ = ["check_rows"]

_NUM_ROWS: Final = 6
_MIXED: Final = (4, 1, 1, 3, 0, 5)
_POISONED: Final = (0, 3)
_NUM_RANKED: Final = 16
_ROUNDED_RANKS: Final = 0.05
"""Largest difference between scores, relative to the largest: means of bfloat16 depend on the order of summation."""


@torch.inference_mode()
def check_rows(model: TransformersModel) -> None:
    """Run a few tokens without attention between them. If one still affects another, outputs would depend on the other
    rows of a step and on chunking.

    :raises UnsupportedArchitectureError: tokens interact outside attention, the class does not use the given positions,
        or the class cannot be run
    """
    try:
        _check_rows(model)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # for example, a vocabulary or context smaller than the trial's
        raise untried(model.config.model_type, "a few tokens", error) from error


def _check_rows(model: TransformersModel) -> None:
    model_type = model.config.model_type
    numbered, mixed = torch.arange(_NUM_ROWS, device=model.device), torch.tensor(_MIXED, device=model.device)
    plain = _run(model, numbered)
    if model.is_encoder and not all(map(are_alike, _run(model, None), plain)):
        raise refusal(model_type, "it counts the positions of a text in a way of its own")
    if not all(are_alike(each, of_plain[mixed]) for each, of_plain in zip(_run(model, mixed), plain, strict=True)):
        raise refusal(model_type, "its positions are not those that it is given")
    if model.rank_head is not None:
        _check_ranks(model, model.rank_head)
    rows = torch.tensor(_POISONED, device=model.device)

    def poison(module: object, args: object, output: Tensor) -> Tensor:
        return output.index_fill(1, rows, torch.nan)

    hook = model.transformers_model.get_input_embeddings().register_forward_hook(poison)
    try:
        poisoned = _run(model, numbered, masked=rows)
    finally:
        hook.remove()
    clean = [row for row in range(_NUM_ROWS) if row not in _POISONED]
    alone = all(are_alike(each[clean], of_plain[clean]) for each, of_plain in zip(poisoned, plain, strict=True))
    if not alone or poisoned[-1][list(_POISONED)].isfinite().any():
        raise refusal(model_type, "its tokens see each other elsewhere than in attention")


def _check_ranks(model: TransformersModel, head: ClassRankHead) -> None:
    """Compare scores from random hidden states with scores from their pooled vectors. The trial's own states would not
    do: with rotary positions, equal tokens have equal states.

    :raises UnsupportedArchitectureError: scores do not follow from the pooled vectors
    """
    random = torch.Generator().manual_seed(0)
    shape = (_NUM_RANKED, _NUM_ROWS, model.config.hidden_size)
    states = torch.randn(shape, generator=random, dtype=torch.float32).to(model.device)
    pooled = states[:, 0] if head.pooling == "cls" else states.mean(1)
    of_pooled, of_states = head.ranks(pooled), head.ranks_of_states(states)
    if not of_pooled.isfinite().any():  # the weights hold NaN, which requests report
        return
    if not are_alike(of_pooled, of_states, _ROUNDED_RANKS):
        raise refusal(model.config.model_type, "it ranks texts by more than one vector of each")


def _unpadded(model: TransformersModel) -> int:
    """Return a token that the class does not take for padding, which has no position: MPNet ignores its config's."""
    modules: Iterable[Any] = model.transformers_model.modules()
    padding = {getattr(model.transformers_model.config.get_text_config(), "pad_token_id", None)}
    padding.update(getattr(module, "padding_idx", None) for module in modules)
    return next(token for token in count(1) if token not in padding)


def _run(model: TransformersModel, positions: Tensor | None, masked: Tensor | None = None) -> list[Tensor]:
    """Run a few equal tokens, and return what each layer and the output computed for each row.

    :param positions: ``[num_rows]``; None: the class counts positions itself
    :param masked: rows whose tokens are the config's mask token, which ESM counts; None: no rows
    """
    seen = TrialAttention()
    model.seam.attend = seen.attend
    tokens = torch.full((_NUM_ROWS,), _unpadded(model), device=model.device)
    mask = getattr(model.transformers_model.config.get_text_config(), "mask_token_id", None)
    if masked is not None and type(mask) is int and mask < model.config.vocab_size:
        tokens[masked] = mask
    given = model.inputs(tokens, torch.arange(_NUM_ROWS, device=model.device) if positions is None else positions)
    if positions is None:
        del given["position_ids"]
    try:
        hidden = model.hidden(given)
    finally:
        model.seam.attend = model.attend
    return [*seen.parts, hidden if model.is_encoder else model.logits(hidden)]
