"""Turns a caller's arguments into a request for the engine, and makes every check that needs no computation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, TypeVar

from anyio.lowlevel import RunVar
from attrs import evolve, field, frozen

from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.token_healing import EncodedPrompt, TokenPrefixes
from paged_sdk.config.checks import as_tuple, is_token_id
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.grammar import Grammar, Language
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.errors import ConstraintError, ContextLengthError, InvalidRequestError
from paged_sdk.kv.block_hash import CacheKey, block_hashes
from paged_sdk.scheduler.request import Request
from paged_sdk.system.helper_threads import HelperThreads
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.types.media import PromptMedia
from paged_sdk.types.messages import Message
from paged_sdk.types.reading import Reading
from paged_sdk.types.request_options import RequestOptions

if TYPE_CHECKING:  # a model without weights loads no tensors
    from paged_sdk.vision.processor import ImagePrompts

__all__ = ["RequestPreparer", "in_thread"]

_T = TypeVar("_T")

MOST_BLOCKS: Final = 1024
"""At most this many blocks of a prompt are hashed here, usually 32,768 tokens: half a millisecond on the event loop."""

MOST_THREADS: Final = 40
"""Threads per event loop for tokenization, in addition to the 40 that anyio has for an application."""
# One set of threads per event loop, as with anyio's own.
_threads: Final[RunVar[HelperThreads]] = RunVar("paged_sdk.calls.preparation.threads")

OPEN_ANSWER: Final = 4096
"""Tokens to leave for the output when a truncated prompt's request sets no maximum length, or a quarter of the longest
prompt if that is less. If a prompt were only cut to fit, one token would be left for the output."""


@frozen(kw_only=True)
class RequestPreparer:
    """Checks requests against one model and fills in defaults.

    :ivar vocab_size: number of logits per token
    :ivar max_sequence_tokens: the most tokens of one sequence for which the KV pool has room
    :ivar why_no_text: why the model cannot generate text, and what it does; None: it can
    :ivar is_bidirectional: whether attention is bidirectional
    :ivar heals_tokens: whether to apply token healing at the end of prompts
    :ivar images: puts images into prompts; None: the model takes none
    :ivar compiles: whether constraints are compiled here; False: where the engine runs
    """

    text: TextProcessor
    config: EngineConfig
    vocab_size: int
    max_sequence_tokens: int
    why_no_text: str | None = None
    is_bidirectional: bool = False
    heals_tokens: bool = False
    images: ImagePrompts | None = None
    compiles: bool = True
    _grammars: GrammarCompiler = field(init=False)

    @_grammars.default
    def _make_compiler(self) -> GrammarCompiler:
        text, vocab_size = self.text, self.vocab_size
        return GrammarCompiler(lambda: _vocabulary(text, vocab_size))

    @property
    def max_prompt_tokens(self) -> int:
        """Return the length of the longest prompt of a request that generates."""
        # The last generated token takes a position of the context, but needs no KV.
        return min(self.config.max_model_len - 1, self.max_sequence_tokens)

    @property
    def max_read_tokens(self) -> int:
        """Return the length of the longest prompt of a request that generates nothing, such as an embedding."""
        return min(self.config.max_model_len, self.max_sequence_tokens)

    def check_generates(self, field: str) -> None:
        """Check that the model can generate text.

        :param field: the argument with the prompt, for the error
        :raises InvalidRequestError: it cannot
        """
        if self.why_no_text is not None:
            raise InvalidRequestError(f"{field}: {self.why_no_text}", field=field)

    def grammar(self, language: Language) -> Grammar:
        """Compile a constraint, which may take ten seconds.

        :raises ConstraintError: it cannot be enforced
        :raises QueueFullError: too many constraints are being compiled
        """
        return self._grammars.compile(language)

    def encode_chat(
        self, messages: Sequence[Message], options: RequestOptions, interruption: Interruption
    ) -> EncodedPrompt:
        """Return the tokens of a chat, with its images.

        :param interruption: lets another thread stop a slow rendering
        :raises InvalidRequestError: the chat template refuses the messages, or one of their images cannot be used
        """
        images = [image for message in messages for image in message.images]
        if images and self.images is None:
            raise InvalidRequestError(
                "this model takes no images",
                field="images",
                value=len(images),
                advice="VisionModelBuilder builds one that does, of a checkpoint with an image encoder, and "
                "GgufModelBuilder with the encoder's file (with_mmproj)",
            )
        token_ids: Sequence[int] = self.text.encode_chat(
            messages,
            continue_final_message=options.continue_final_message,
            enable_thinking=options.enable_thinking,
            reasoning_effort=options.reasoning_effort,
            tools=options.shown_tools,
            special_tokens_in_content=options.special_tokens_in_content,
            interruption=interruption,
        )
        if self.images is None:
            return EncodedPrompt(token_ids)
        token_ids, media = self.images.insert(token_ids, images)
        return EncodedPrompt(token_ids, media=media)

    def encode_prompt(self, text: str, options: RequestOptions, field: str) -> EncodedPrompt:
        """Return the tokens of a text to continue, without the last ones if they are to be healed.

        Under a constraint nothing is healed: constrained output begins where the prompt ends.

        :param field: the text's name in errors
        :raises InvalidRequestError: the text has no tokens
        """
        token_ids = self.text.encode_prompt(text, field)
        heals = self.heals_tokens and options.answer_form is AnswerForm.FREE
        return self.prefixes.heal(token_ids) if heals else EncodedPrompt(token_ids)

    @cached_property
    def prefixes(self) -> TokenPrefixes:
        """Return the index of tokens for healing."""
        tokenizer = self.text.tokenizer
        own = (token_id for token_id in range(self.vocab_size) if not tokenizer.is_special(token_id))
        return TokenPrefixes((token_id, tokenizer.token_bytes(token_id)) for token_id in own)

    def sampling(self, options: RequestOptions) -> SamplingParams:
        """Return the request's sampling with the checkpoint's defaults and a seed filled in.

        :raises InvalidRequestError: more choices than sequences, or token ids outside the vocabulary
        """
        if options.sampling is None:
            return evolve(SamplingParams.deterministic(), seed=0)
        sampling = options.sampling
        if sampling.n_choices > self.config.max_num_seqs:
            raise InvalidRequestError.of(
                "n_choices", sampling.n_choices, f"at most max_num_seqs = {self.config.max_num_seqs}"
            )
        self.check_token_ids("stop_token_ids", sampling.stop_token_ids)
        self.check_token_ids("logits_bias", tuple(sampling.logits_bias or ()))
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return evolve(sampling.with_defaults(self.text.defaults), seed=seed)

    def check_prediction(self, options: RequestOptions, num_prompts: int) -> None:
        """Check that a request with a prediction asks for one output.

        :raises InvalidRequestError: there are several prompts or choices
        """
        if options.prediction is None:
            return
        if num_prompts > 1:
            raise InvalidRequestError.of("prediction", options.prediction, "None for several prompts")
        if options.sampling is not None and options.sampling.n_choices > 1:
            allowed = "1 beside a prediction, which is of one text"
            raise InvalidRequestError.of("n_choices", options.sampling.n_choices, allowed)

    def encode_prediction(self, options: RequestOptions) -> Sequence[int]:
        """Return the tokens of the prediction; empty if there is none. Long ones take milliseconds.

        :raises InvalidRequestError: the prediction is longer than the context
        """
        if options.prediction is None:
            return ()
        token_ids = self.text.tokenizer.encode(options.prediction, add_special_tokens=False)
        limit = self.config.max_model_len
        if len(token_ids) > limit:
            raise InvalidRequestError(
                f"the prediction has {len(token_ids)} tokens, more than the context of {limit}",
                field="prediction",
                value=len(token_ids),
                allowed=f"at most {limit} tokens",
            )
        return token_ids

    def check_token_ids(self, field: str, token_ids: object, *, or_text: bool = False) -> Sequence[int]:
        """Check token ids and return them.

        :param token_ids: ints, in a sequence or an array; numpy's are converted to Python's
        :param or_text: whether a text would have been accepted too, for the error
        :raises InvalidRequestError: anything else, or an id outside the vocabulary
        """
        allowed = ("a text, or " if or_text else "") + f"token ids from 0 to {self.vocab_size - 1}"
        ids = token_ids
        # Long prompts are nearly always lists of ints: a million are checked in 40 ms, without a copy.
        if (
            isinstance(ids, list | tuple)
            and set(map(type, ids)) == {int}
            and min(ids) >= 0
            and max(ids) < self.vocab_size
        ):
            return ids
        if not isinstance(ids, list | tuple) or any(type(token_id) is not int for token_id in ids):
            ids = as_tuple(token_ids)
        if not isinstance(ids, tuple | list) or isinstance(token_ids, str | Set):
            raise InvalidRequestError.of(field, token_ids, allowed)
        for token_id in ids:
            if not is_token_id(token_id) or token_id >= self.vocab_size:
                raise InvalidRequestError.of(field, token_id, allowed)
        return ids

    def prepare(
        self,
        prompt: EncodedPrompt,
        options: RequestOptions,
        sampling: SamplingParams,
        *,
        prediction_token_ids: Sequence[int] = (),
        request_id: str,
        arrival: float,
        field: str,
        continues_prompt: bool,
        kept_special_ids: frozenset[int] = frozenset(),
        may_reason: bool = False,
        language: Language | None = None,
        grammar: Grammar | None = None,
        adapter: AdapterUse | None = None,
        reading: Reading | None = None,
        is_pinned: bool = False,
    ) -> Request:
        """Make the request for the engine.

        :param prediction_token_ids: see :meth:`encode_prediction`
        :param arrival: when it was submitted, in seconds of the monotonic clock
        :param field: the argument with the prompt, for errors: "messages", "prompt", or one of several prompts
        :param continues_prompt: see :class:`Request`, also for ``kept_special_ids``, ``language`` and the parameters
            after it
        :param may_reason: whether the output may begin with reasoning
        :raises InvalidRequestError: an empty prompt, or a token outside the vocabulary
        :raises ContextLengthError: a prompt that can never fit and may not be truncated
        """
        prompt_token_ids, healing = prompt.token_ids, prompt.healing
        if not prompt_token_ids:
            raise InvalidRequestError.of(field, [], "at least one token")
        if max(prompt_token_ids) >= self.vocab_size:
            raise self._unknown_token(max(prompt_token_ids), field)
        limit = self.max_prompt_tokens if reading is None else self.max_read_tokens
        if len(prompt_token_ids) > limit:
            if not options.truncation:
                can_be_cut = reading is None and not is_pinned and prompt.media is None
                raise self._too_long(len(prompt_token_ids), limit, field, can_be_cut=can_be_cut)
            if prompt.media is not None:
                raise InvalidRequestError.of("truncation", True, "no images: a prompt with images is not cut")
            prompt_token_ids = self._truncated(prompt_token_ids, sampling)
        room = self.config.max_model_len - len(prompt_token_ids)
        most = room if sampling.max_len is None else sampling.max_len + (0 if healing is None else healing.num_tokens)
        adapter_start = 0 if adapter is None else adapter.first_token(prompt_token_ids)
        if adapter_start is None:  # as in PEFT, the base model serves prompts that do not invoke the adapter
            adapter, adapter_start = None, 0
        budget, thought_limit = options.thinking_budget, None
        if may_reason and budget is not None:
            thought_limit = self.text.thought_limit(budget, prompt_token_ids)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos or language is not None:
            stop_token_ids |= self.text.stop_token_ids
        cache_keys = _cache_keys(options, adapter, adapter_start, prompt.media)
        return Request(
            request_id=request_id,
            options=options,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            max_tokens=min(room, most),
            arrival=arrival,
            continues_prompt=continues_prompt,
            healing=healing,
            prediction_token_ids=prediction_token_ids,
            kept_special_ids=kept_special_ids,
            thought_limit=thought_limit,
            language=language,
            grammar=grammar,
            adapter=adapter,
            adapter_start=adapter_start,
            media=prompt.media,
            cache_keys=cache_keys,
            block_hashes=self._block_hashes(prompt_token_ids, cache_keys),
            is_bidirectional=self.is_bidirectional,
            reading=reading,
            is_pinned=is_pinned,
        )

    def _block_hashes(self, prompt_token_ids: Sequence[int], cache_keys: Sequence[CacheKey]) -> Sequence[bytes]:
        """Hash the prompt's first blocks, for a router and the engine."""
        if not (self.config.paged and self.config.prefix_cache_n):
            return ()
        return block_hashes(prompt_token_ids, self.config.block_size, cache_keys, most=MOST_BLOCKS)

    def _unknown_token(self, token_id: int, field: str) -> InvalidRequestError:
        """Return the error for a prompt with a token that the tokenizer has and the model does not."""
        tokenizer = self.text.tokenizer
        if token_id in (*tokenizer.special.prefix, *tokenizer.special.suffix):
            origin = "the tokenizer puts it around every text"
        else:
            origin = "the tokenizer made it of the " + ("chat template's text" if field == "messages" else "prompt")
        piece = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return InvalidRequestError(
            f"token id {token_id} ({piece!r}) is not in the model's vocabulary of {self.vocab_size} tokens: {origin}",
            field=field,
            value=token_id,
            allowed=f"token ids from 0 to {self.vocab_size - 1}",
        )

    def _too_long(self, num_tokens: int, limit: int, field: str, *, can_be_cut: bool) -> ContextLengthError:
        """Return the error for a prompt that can never fit.

        :param can_be_cut: whether the caller could have asked for truncation
        """
        what = "the prompt" if field in ("messages", "prompt") else field
        advice = ["shorten it"]
        if can_be_cut:
            advice.append("use RequestBuilder.with_truncation()" if field == "messages" else "use truncation=True")
        cause = f"the context is {self.config.max_model_len}"
        if self.max_sequence_tokens < self.config.max_model_len:
            cause = f"the KV pool is {self.config.num_blocks} blocks of {self.config.block_size}"
            advice.append("give the KV pool more memory")
        *first, last = advice
        return ContextLengthError(
            f"{what} has {num_tokens} tokens, {limit} fit ({cause})",
            field=field,
            num_tokens=num_tokens,
            limit=limit,
            advice=f"{', '.join(first)}{', or ' * bool(first)}{last}",
        )

    def _truncated(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        """Return the end of a prompt that is too long."""
        # Leave tokens for the requested output, but at most half: the prompt matters more.
        if sampling.max_len is None:
            reserved = min(OPEN_ANSWER, self.max_prompt_tokens // 4)
        else:
            reserved = min(sampling.max_len - 1, self.max_prompt_tokens // 2)
        return prompt_token_ids[len(prompt_token_ids) - (self.max_prompt_tokens - reserved) :]


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a function in a helper thread: tokenizing a long text takes milliseconds, too long for the event loop.

    The function must end, because the program's exit waits for it: templates and constraints have time limits.
    """
    threads = _threads.get(None)
    if threads is None:
        threads = HelperThreads(MOST_THREADS)
        _threads.set(threads)
    return await threads.run(function, "to make tokens in")


def _cache_keys(
    options: RequestOptions, adapter: AdapterUse | None, adapter_start: int, media: PromptMedia | None
) -> tuple[CacheKey, ...]:
    """Return everything beside the tokens that the request's KV depends on; an image counts from its first token."""
    keys = [] if options.cache_salt is None else [CacheKey(b"salt:" + options.cache_salt.encode())]
    if adapter is not None:
        keys.append(CacheKey(b"adapter:" + adapter.digest, adapter_start))
    if media is not None:
        keys += [CacheKey(b"image:" + span.digest, span.first_token) for span in media.spans]
    return tuple(keys)


def _vocabulary(text: TextProcessor, vocab_size: int) -> Vocabulary:
    """Describe a model's tokens for grammars.

    :raises ConstraintError: the model has no end-of-text token
    """
    tokenizer = text.tokenizer
    ends = tuple(sorted(token for token in text.stop_token_ids if token < vocab_size))
    if not ends:
        raise ConstraintError("the model has no end-of-text token, so its output cannot be constrained by a grammar")
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(vocab_size)],
        special_ids=[token for token in range(vocab_size) if tokenizer.is_special(token) or token in ends],
        end_ids=ends,
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
