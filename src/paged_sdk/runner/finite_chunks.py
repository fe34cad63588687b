"""Look whether the keys and values are whole of chunks whose logits nobody computes."""

from __future__ import annotations

from functools import partial

from paged_sdk.errors import NumericalError
from paged_sdk.kernels.transfer import HostCopies
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.step_states import StepStates
from paged_sdk.sampling.candidates import select_rows

__all__ = ["check_chunks"]


def check_chunks(late: LateResults, states: StepStates) -> None:
    """Let a row fail that ends within its prompt, if NaN has come into the prompt. Its blocks would be found by others
    until the prompt's end shows it: even by those that share no more than tokens before the one that has made it, as
    attention gives that one a weight of 0 there, which it makes NaN.

    The last token shows it, which attends to those before it, by its hidden state before the last norm, or before the
    last layer where fused layers leave out rows that nobody reads: what is infinite in an earlier layer is NaN there.
    What another token is after that layer alone is in that token's own keys and values at most, which only those find
    who share the token.
    """
    indices = [index for index, row in enumerate(late.scheduled) if not row.num_samples]
    if not indices:
        return
    last = [states.first_tokens[index] + late.scheduled[index].num_new_tokens - 1 for index in indices]
    copies = HostCopies(select_rows(states.hidden, last).isnan().any(-1))
    for place, index in enumerate(indices):
        late.add(index, partial(_check, copies, place, late.scheduled[index].sequence.request.request_id))


def _check(copies: HostCopies, place: int, request_id: str) -> None:
    (are_broken,) = copies.wait()
    if are_broken[place]:
        raise NumericalError(f"request {request_id}: the hidden states hold NaN", request_id=request_id)
