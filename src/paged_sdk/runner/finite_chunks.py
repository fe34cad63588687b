"""Check prefill chunks for NaN: their logits are never computed, so the sampler cannot notice."""

from __future__ import annotations

from functools import partial

from paged_sdk.errors import NumericalError
from paged_sdk.kernels.transfer import HostCopies
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.step_states import StepStates
from paged_sdk.sampling.candidates import select_rows

__all__ = ["check_chunks"]


def check_chunks(late: LateResults, states: StepStates) -> None:
    """Fail rows that sample nothing and whose prompt holds NaN.

    Otherwise other requests would find the chunk's blocks in the prefix cache until the end of the prompt shows the
    NaN. Blocks before the token that caused it are affected too: attention gives later tokens weight 0, and 0 * NaN is
    NaN.

    The chunk's last token shows it, since it attends to all earlier tokens: its hidden state before the last norm is
    checked (before the last layer, where fused layers leave out rows that are not read). An infinity of an earlier
    layer is NaN there. A NaN that another token gets only after that layer is at most in that token's own KV, which
    only requests that share the token can find.
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
