"""Describe loaded adapters, and the adapter that a request uses."""

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
    """Identifies the adapter that a request uses.

    :ivar number: identifies it in its engine; never reused
    :ivar name: its name for requests
    :ivar digest: a hash of its content: requests of adapters with the same digest share cached KV
    :ivar invocation: token ids that activate the adapter from their last occurrence in a prompt on; empty: it applies
        to all tokens
    :ivar rank: the largest rank among its updates
    :ivar num_bytes: the memory that its matrices take
    """

    number: int
    name: str
    digest: bytes
    invocation: tuple[int, ...] = ()
    rank: int = 0
    num_bytes: int = 0

    @property
    def info(self) -> AdapterInfo:
        """Return the public description."""
        return AdapterInfo(name=self.name, digest=self.digest.hex(), rank=self.rank, num_bytes=self.num_bytes)

    def first_token(self, prompt_token_ids: Sequence[int]) -> int | None:
        """Return the index of the first token that the adapter applies to; None if the prompt does not invoke it."""
        wanted = list(self.invocation)
        last = len(prompt_token_ids) - len(wanted)
        starts = range(last, -1, -1) if wanted else (0,)
        return next((place for place in starts if list(prompt_token_ids[place : place + len(wanted)]) == wanted), None)
