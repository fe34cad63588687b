"""A request as the engine sees it: token ids in, nothing left to resolve."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from paged_sdk.config.sampling import SamplingParams

__all__ = ["EngineRequest"]


@frozen(kw_only=True)
class EngineRequest:
    """A request that passed every check.

    :ivar prompt_token_ids: at least one
    :ivar sampling: with the checkpoint's defaults and a seed filled in
    :ivar stop_token_ids: tokens that end a text
    :ivar max_tokens: tokens of output at most
    :ivar arrival: when it was submitted, in seconds of the monotonic clock
    :ivar continues_prompt: the text goes on where the prompt ended, rather than being a turn of its own
    :ivar extra_keys: what beside the tokens tells prefix-cache blocks apart
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    max_tokens: int
    arrival: float
    continues_prompt: bool = False
    priority: int = 0
    extra_keys: tuple[bytes, ...] = ()
