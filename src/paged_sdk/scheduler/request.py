"""Defines a request as the engine receives it: the prompt is token ids, and every setting has a value."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from paged_sdk.chat.thoughts import ThoughtLimit
from paged_sdk.chat.token_healing import Healing
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.constraints.grammar import Grammar, Language
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.media import PromptMedia
from paged_sdk.types.reading import Reading
from paged_sdk.types.request_options import RequestOptions

__all__ = ["Request"]


@frozen(kw_only=True, eq=False)
class Request:
    """Holds a request that passed every check. Every component refers to this one value; no field is copied.

    A new setting becomes a field of :class:`~paged_sdk.types.request_options.RequestOptions`, with its validator, and
    is read through ``sequence.request.options``. The other fields here are derived.

    :ivar options: what the caller asked for beside the prompt
    :ivar prompt_token_ids: the prompt, at least one token
    :ivar sampling: how to sample, with the checkpoint's defaults and a seed filled in
    :ivar stop_token_ids: tokens that end the output
    :ivar max_tokens: the most tokens to generate per choice
    :ivar arrival: when the request was submitted, in seconds of the monotonic clock
    :ivar continues_prompt: whether the output continues the prompt's text, rather than being a turn of its own
    :ivar healing: bytes taken from the prompt's end, with which the output has to begin; None: none
    :ivar prediction_token_ids: the caller's prediction of the output; empty: none
    :ivar kept_special_ids: special tokens that have text in the output, because the answer's parser looks for them
    :ivar thought_limit: when reasoning ends; None: when the model ends it, if it reasons
    :ivar language: the constraint on the output; None: unconstrained
    :ivar grammar: the compiled ``language``; None: there is no ``language``, or it is not compiled yet
    :ivar adapter: the adapter to apply; None: none
    :ivar adapter_start: the first token to which the adapter is applied
    :ivar media: the images of the prompt; None: it has none
    :ivar cache_keys: everything beside the tokens that the request's KV depends on
    :ivar block_hashes: hashes of the prompt's first full blocks, as far as they were computed; the engine computes the
        rest
    :ivar is_bidirectional: whether attention is bidirectional, so that all tokens have to be computed in one step
    :ivar reading: what to compute from the prompt instead of generating, such as an embedding; None: nothing
    :ivar is_pinned: whether to compute the prompt's KV and hold it until the request is aborted, instead of generating
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    continues_prompt: bool = False
    healing: Healing | None = None
    prediction_token_ids: Sequence[int] = ()
    kept_special_ids: frozenset[int] = frozenset()
    thought_limit: ThoughtLimit | None = None
    language: Language | None = None
    grammar: Grammar | None = None
    adapter: AdapterUse | None = None
    adapter_start: int = 0
    media: PromptMedia | None = None
    cache_keys: tuple[CacheKey, ...] = ()
    block_hashes: Sequence[bytes] = ()
    is_bidirectional: bool = False
    reading: Reading | None = None
    is_pinned: bool = False
    options: RequestOptions = field(factory=RequestOptions)

    @property
    def generates(self) -> bool:
        """Return whether tokens are to be sampled after the prompt."""
        return self.reading is None and not self.is_pinned

    @property
    def num_choices(self) -> int:
        """Return how many choices the request asks for."""
        return self.sampling.n_choices

    @property
    def most_shared(self) -> int | None:
        """Return how many leading tokens may take their KV from the prefix cache; None: all but the last. Tokens whose
        hidden states are read have to be computed: the cache has only KV.
        """
        if self.reading is not None:
            return self.reading.states(len(self.prompt_token_ids)).start
        return None if self.sampling.prompt_logprobs is None else 0

    @property
    def shares_prefix(self) -> bool:
        """Return whether the request may use the prefix cache at all."""
        return self.most_shared != 0
