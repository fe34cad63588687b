"""Defines a request as the engine takes it: the prompt is token ids, and every setting has a value."""

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
    """Holds a request that passed every check. Everything that serves the request refers to this one value.

    A new kind of setting becomes a field of :class:`~paged_sdk.types.request_options.RequestOptions`, with its
    validator there, and its user reads it through ``sequence.request.options``. This class holds what had to be worked
    out.

    :ivar options: what the caller asked for beside the prompt
    :ivar prompt_token_ids: the prompt, at least one token
    :ivar sampling: how to sample, with the checkpoint's defaults and a seed filled in
    :ivar stop_token_ids: tokens that end a text
    :ivar max_tokens: how many tokens a text gets at most
    :ivar arrival: when the request was submitted, in seconds of the monotonic clock
    :ivar continues_prompt: whether the text goes on where the prompt ended, rather than being a turn of its own
    :ivar healing: with which bytes the text has to begin, that were taken from the prompt's end
    :ivar prediction_token_ids: what the text will likely be; empty: nobody has said
    :ivar kept_special_ids: special tokens that have a text in its output, for what looks for them there
    :ivar thought_limit: when its thoughts end; None: when the model ends them, if it thinks
    :ivar language: what every text is a sentence of; None: any text
    :ivar grammar: it, compiled; None: any text, or it is compiled on the way to the engine
    :ivar adapter: the adapter that the texts go through; None: none
    :ivar adapter_start: the first token that goes through it
    :ivar media: the images of the prompt; None: it has none
    :ivar cache_keys: everything beside the tokens that its KV depends on
    :ivar block_hashes: names of the prompt's first full blocks, as far as somebody has made them; the engine makes the
        others
    :ivar is_whole: whether its tokens attend to later ones too, so that all are computed in one step
    :ivar reading: what is read off the prompt, which then ends the request; None: it is continued by a text
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
    is_whole: bool = False
    reading: Reading | None = None
    options: RequestOptions = field(factory=RequestOptions)

    @property
    def num_choices(self) -> int:
        """Return how many texts the request asks for."""
        return self.sampling.n_choices

    @property
    def most_shared(self) -> int | None:
        """Return how many leading tokens may have their KV from the prefix cache; None: all but the last. Tokens whose
        hidden states are read have to be computed: a cached block has none.
        """
        if self.reading is not None:
            return self.reading.states(len(self.prompt_token_ids)).start
        return None if self.sampling.prompt_logprobs is None else 0

    @property
    def shares_prefix(self) -> bool:
        """Say whether it may use KV from the prefix cache at all."""
        return self.most_shared != 0
