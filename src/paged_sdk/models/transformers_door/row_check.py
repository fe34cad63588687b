"""Check that the rows of a step meet in attention alone, and that their positions are those they are given."""

from __future__ import annotations

from typing import Final

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.rank_head import ClassRankHead
from paged_sdk.models.transformers_door.seam import AttentionCall
from paged_sdk.models.transformers_door.skeleton import refusal

__all__ = ["check_rows"]

_NUM_ROWS: Final = 6
_MIXED: Final = (4, 1, 1, 3, 0, 5)
_POISONED: Final = (0, 3)
_NUM_RANKED: Final = 16
_ROUNDED_RANKS: Final = 0.05
"""Means of bfloat16 numbers that are summed in another order differ by so much of the largest rank at most."""


@frozen(eq=False)
class _Seen:
    """Collects what a run says of each row: queries and keys of all layers, and the scores."""

    parts: list[Tensor] = field(factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        """Let each token see itself alone."""
        self.parts.extend(each[0].transpose(0, 1).flatten(1).float() for each in (call.query, call.key))
        repeats = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous()


@torch.inference_mode()
def check_rows(model: TransformersModel) -> None:
    """Run a few tokens without attention between them: whatever one of them changes of another goes past the cache, and
    a text would depend on its neighbours and on how it is cut into steps.

    :raises UnsupportedArchitectureError: that is the case, or the class has positions of its own, or cannot be run
    """
    try:
        _check_rows(model)
    except UnsupportedArchitectureError:
        raise
    except Exception as error:  # of a checkpoint with fewer tokens or positions than are tried, for one
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise refusal(model.config.model_type, f"a few tokens cannot be tried ({shown(reason)})") from error


def _check_rows(model: TransformersModel) -> None:
    model_type = model.config.model_type
    numbered, mixed = torch.arange(_NUM_ROWS, device=model.device), torch.tensor(_MIXED, device=model.device)
    plain = _run(model, numbered)
    if model.is_encoder and not all(map(_alike, _run(model, None), plain)):
        raise refusal(model_type, "it counts the positions of a text in a way of its own")
    if not all(_alike(each, of_plain[mixed]) for each, of_plain in zip(_run(model, mixed), plain, strict=True)):
        raise refusal(model_type, "its positions are not those that it is given")
    if model.rank_head is not None:
        _check_ranks(model, model.rank_head)
    rows = torch.tensor(_POISONED, device=model.device)

    def poison(module: object, args: object, output: Tensor) -> Tensor:
        return output.index_fill(1, rows, torch.nan)

    hook = model.transformers_model.get_input_embeddings().register_forward_hook(poison)
    try:
        poisoned = _run(model, numbered)
    finally:
        hook.remove()
    clean = [row for row in range(_NUM_ROWS) if row not in _POISONED]
    if not all(each[clean].isfinite().all() for each in poisoned) or poisoned[-1][list(_POISONED)].isfinite().any():
        raise refusal(model_type, "its tokens see each other elsewhere than in attention")


def _check_ranks(model: TransformersModel, head: ClassRankHead) -> None:
    """Rank texts of random hidden states, which differ from token to token: equal tokens have equal ones in a class
    whose positions are rotary.

    :raises UnsupportedArchitectureError: the ranks do not follow from the pooled hidden states
    """
    random = torch.Generator().manual_seed(0)
    states = torch.randn(_NUM_RANKED, _NUM_ROWS, model.config.hidden_size, generator=random).to(model.device)
    pooled = states[:, 0] if head.pooling == "cls" else states.mean(1)
    of_pooled, of_states = head.ranks(pooled), head.ranks_of_states(states)
    if not of_pooled.isfinite().any():  # weights hold NaN: requests say so
        return
    if of_pooled.shape != of_states.shape or not _alike(of_pooled, of_states, _ROUNDED_RANKS):
        raise refusal(model.config.model_type, "it ranks texts by more than one vector of each")


def _run(model: TransformersModel, positions: Tensor | None) -> list[Tensor]:
    """Run as many equal tokens as there are rows.

    :param positions: None: those that the class gives to tokens which have none
    """
    seen = _Seen()
    model.seam.attend = seen.attend
    padding = getattr(model.transformers_model.config.get_text_config(), "pad_token_id", None)
    tokens = torch.full((_NUM_ROWS,), 2 if padding == 1 else 1, device=model.device)
    given = model.inputs(tokens, torch.arange(_NUM_ROWS, device=model.device) if positions is None else positions)
    if positions is None:
        del given["position_ids"]
    try:
        hidden = model.hidden(given)
    finally:
        model.seam.attend = model.attend
    return [*seen.parts, hidden if model.is_encoder else model.logits(hidden)]


def _alike(some: Tensor, others: Tensor, rounding: float = 1e-3) -> bool:
    """Say whether numbers are the same up to rounding; positions that are others change them by as much as they are."""
    return bool((some - others).abs().max() <= rounding * others.abs().max())
