"""Describe a decoder that drafts over another model's keys and values."""

from __future__ import annotations

from attrs import frozen

__all__ = ["AssistantConfig"]


@frozen(kw_only=True)
class AssistantConfig:
    """Describes what an assistant has besides a decoder (Gemma 4): a small model that drafts for one target.

    It reads the embedding of the last token beside the target's hidden state at the token before it, and attends over
    the target's keys and values. It keeps none of its own.

    :ivar target_size: hidden size of its target
    :ivar num_clusters: number of clusters of tokens, of equal size, that the vocabulary is divided into; 0: it is not
    :ivar num_searched: number of clusters, those that score best, among whose tokens the likeliest is looked for
    """

    target_size: int
    num_clusters: int = 0
    num_searched: int = 0
