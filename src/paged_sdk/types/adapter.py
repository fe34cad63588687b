"""Name a loaded adapter, and say where one is."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

__all__ = ["AdapterInfo", "AdapterUse"]


@frozen(kw_only=True)
class AdapterInfo:
    """Describes a loaded adapter.

    :ivar name: its name for requests
    :ivar digest: a hash of its content, 64 hexadecimal digits, whatever its name
    :ivar rank: the largest rank among its updates
    :ivar num_bytes: the memory that its matrices take
    """

    name: str
    digest: str
    rank: int
    num_bytes: int


@frozen
class AdapterUse:
    """Names the adapter that a request goes through.

    :ivar number: identifies it in its engine; no other one ever has the same
    :ivar name: what the caller calls it
    :ivar digest: of its content: KV that was computed with it is found by requests of any adapter with this content
    :ivar invocation: the tokens from whose last occurrence in a prompt on it changes anything; empty: it changes all
    :ivar rank: the largest rank among its updates
    :ivar num_bytes: what its matrices take
    """

    number: int
    name: str
    digest: bytes
    invocation: tuple[int, ...] = ()
    rank: int = 0
    num_bytes: int = 0

    @property
    def info(self) -> AdapterInfo:
        """Return what users are told of it."""
        return AdapterInfo(name=self.name, digest=self.digest.hex(), rank=self.rank, num_bytes=self.num_bytes)

    def first_token(self, prompt_token_ids: Sequence[int]) -> int | None:
        """Return the place of the first token that goes through it; None: no token of the text does."""
        wanted = list(self.invocation)
        last = len(prompt_token_ids) - len(wanted)
        starts = range(last, -1, -1) if wanted else (0,)
        return next((place for place in starts if list(prompt_token_ids[place : place + len(wanted)]) == wanted), None)
