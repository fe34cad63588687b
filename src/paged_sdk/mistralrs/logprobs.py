"""Holds logprobs with mistral.rs's attributes."""

from __future__ import annotations

from attrs import frozen

import paged_sdk

__all__ = ["Logprobs", "ResponseLogprob", "TopLogprob"]


@frozen(kw_only=True)
class TopLogprob:
    """Describes one of the likeliest tokens at a position.

    :ivar token: token id
    :ivar logprob: natural logarithm of its probability, before temperature and truncation
    :ivar bytes: text of the token, despite the name
    """

    token: int
    logprob: float
    bytes: str | None


@frozen(kw_only=True)
class ResponseLogprob:
    """Describes the chosen token at a position, and the likeliest ones there.

    :ivar token: text of the token
    :ivar bytes: UTF-8 bytes of the token
    """

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]

    @classmethod
    def of(cls, token: paged_sdk.TokenLogprob) -> ResponseLogprob:
        """Convert the SDK's logprob of a token."""
        return cls(
            token=token.token,
            logprob=token.logprob,
            bytes=list(token.bytes),
            top_logprobs=[
                TopLogprob(token=top.token_id, logprob=top.logprob, bytes=top.token) for top in token.top_logprobs
            ],
        )


@frozen(kw_only=True)
class Logprobs:
    """Holds the logprobs of one text.

    :ivar content: one entry per token
    """

    content: list[ResponseLogprob] | None

    @classmethod
    def of(cls, logprobs: paged_sdk.Logprobs | None) -> Logprobs | None:
        """Convert the SDK's logprobs."""
        return None if logprobs is None else cls(content=[ResponseLogprob.of(token) for token in logprobs.content])
