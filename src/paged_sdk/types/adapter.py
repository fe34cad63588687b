"""Name a loaded adapter, and say where one is."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

__all__ = ["AdapterUse"]


@frozen
class AdapterUse:
    """Names the adapter that a request goes through.

    :ivar number: identifies it in its engine; no other one ever has the same
    :ivar name: what the caller calls it
    :ivar digest: of its content: KV that was computed with it is found by requests of any adapter with this content
    :ivar invocation: the tokens from whose last occurrence in a prompt on it changes anything; empty: it changes all
    """

    number: int
    name: str
    digest: bytes
    invocation: tuple[int, ...] = ()

    def first_token(self, prompt_token_ids: Sequence[int]) -> int | None:
        """Return the place of the first token that goes through it; None: no token of the text does."""
        wanted = list(self.invocation)
        last = len(prompt_token_ids) - len(wanted)
        starts = range(last, -1, -1) if wanted else (0,)
        return next((place for place in starts if list(prompt_token_ids[place : place + len(wanted)]) == wanted), None)
