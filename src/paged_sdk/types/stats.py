"""Hold an engine's statistics."""

from __future__ import annotations

from attrs import evolve, frozen

__all__ = ["ModelStats"]


@frozen(kw_only=True)
class ModelStats:
    """Shows the engine's state after its last step.

    :ivar blocks_total: blocks of the KV pool; without paged attention: slots, one per running or kept sequence
    :ivar blocks_used: held by live sequences
    :ivar blocks_cached: available, but still holding a cached prefix
    :ivar blocks_free: available and empty; used + cached + free = total
    :ivar blocks_pinned: of those used, held by pinned prefixes (:meth:`Model.pin`)
    :ivar running: sequences with KV
    :ivar waiting: sequences in the queue
    :ivar awaiting_images: waiting sequences whose images are being encoded
    :ivar prefix_queries: prompt tokens looked up in the prefix cache since the start
    :ivar prefix_hits: of those, tokens found
    :ivar prefix_restored: tokens whose KV was read back from the prefix cache's directory into the pool
    :ivar preemptions: how often a sequence gave up its KV to others
    :ivar steps: engine steps since the start
    :ivar prompt_tokens: prompt tokens computed since the start
    :ivar completion_tokens: tokens generated since the start
    :ivar drafted_tokens: draft tokens verified
    :ivar accepted_tokens: of those, the correct ones
    :ivar forced_tokens: generated tokens that were the only ones a constraint allowed; they do not count as drafts
    :ivar draft_speed_up: how many times longer generation so far would have taken without drafts, estimated from steps
        without drafts; 1 if there were no drafts
    :ivar prompt_tok_per_sec: prompt tokens per second over the last ten seconds of work
    :ivar completion_tok_per_sec: generated tokens per second over the last ten seconds of work
    """

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    blocks_pinned: int = 0
    running: int = 0
    waiting: int = 0
    awaiting_images: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_restored: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    draft_speed_up: float = 1.0
    prompt_tok_per_sec: float = 0.0
    completion_tok_per_sec: float = 0.0

    def at_rest(self) -> ModelStats:
        """Return the statistics of the engine after it has ended and freed its memory."""
        return evolve(
            self,
            blocks_used=0,
            blocks_cached=0,
            blocks_free=self.blocks_total,
            blocks_pinned=0,
            running=0,
            waiting=0,
            awaiting_images=0,
        )

    @property
    def prefix_hit_rate(self) -> float:
        """Return the fraction of looked-up prompt tokens that were in the prefix cache, 0 to 1."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    @property
    def draft_acceptance(self) -> float:
        """Return the fraction of draft tokens that were correct, 0 to 1."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
