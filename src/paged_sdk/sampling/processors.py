"""Lists the logits processors, in the order in which they change logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_sdk.sampling.bias import LogitsBias
from paged_sdk.sampling.constraint import Constraints
from paged_sdk.sampling.custom import CustomProcessors
from paged_sdk.sampling.dry import Dry
from paged_sdk.sampling.healing import TokenHealing
from paged_sdk.sampling.min_tokens import MinTokens
from paged_sdk.sampling.penalties import Penalties
from paged_sdk.sampling.processor import Processor
from paged_sdk.sampling.thoughts import ThoughtEnd

__all__ = ["default_processors"]


def default_processors(
    vocab_size: int, encode: Callable[[str], list[int]], *, prepare_all_masks: bool = False
) -> tuple[Processor[Any], ...]:
    """Make the logits processors of one model. Temperature, top-k, top-p and min-p come after all of them.

    :param vocab_size: columns of the logits
    :param encode: encodes text to token ids, without special tokens
    :param prepare_all_masks: whether processors compute all constraint masks before the logits are available, as is
        best if a device computes the logits meanwhile
    """
    return (
        LogitsBias(vocab_size),
        MinTokens(vocab_size),
        Penalties(),
        Dry(encode),
        TokenHealing(),
        ThoughtEnd(),
        CustomProcessors(),
        # Last, so that no other processor can allow a token that the grammar bans.
        Constraints(vocab_size, prepare_all_masks=prepare_all_masks),
    )
