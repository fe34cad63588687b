"""Make sequences in a line, for tests of code that handles them."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from attrs import evolve

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.request_options import RequestOptions

SAMPLING = SamplingParams(temperature=0.0, seed=0)


def make_sequence(
    seq_id: int,
    prompt: Tokens[int] = (1,),
    sampling: SamplingParams = SAMPLING,
    *,
    max_tokens: int = 12,
    stop_token_ids: frozenset[int] = frozenset(),
    num_choices: int | None = None,
    priority: int = 0,
    arrival: float | None = None,
    cache_keys: tuple[CacheKey, ...] = (),
    is_pinned: bool = False,
) -> Sequence:
    """Make a sequence of a request of its own, called ``request-{seq_id}``.

    :param num_choices: the number of choices, instead of the sampling's own
    :param arrival: the order of arrival, the sequence's id by default
    """
    if num_choices is not None:
        sampling = evolve(sampling, n_choices=num_choices)
    return Sequence(
        seq_id,
        Request(
            request_id=f"request-{seq_id}",
            prompt_token_ids=list(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            options=RequestOptions(priority=priority),
            arrival=float(seq_id) if arrival is None else arrival,
            cache_keys=cache_keys,
            is_pinned=is_pinned,
        ),
    )
