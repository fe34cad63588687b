"""Hold a chat request with everything that can be said about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

from attrs import evolve, field, frozen

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.logits_processor import LogitsProcessor, check_logits_processors
from paged_sdk.types.messages import Message, MessageLike, TextMessageRole, TextMessages, parse_messages

__all__ = [
    "ChatRequestLike",
    "CompletionOptions",
    "PromptLike",
    "RequestBuilder",
    "RequestOptions",
    "as_request",
    "completion_options",
]


@frozen(kw_only=True)
class RequestOptions:
    """Holds what a request says beside its prompt.

    :ivar sampling: None is greedy
    :ivar priority: higher goes first; equal ones in order of arrival
    :ivar timeout: seconds until :class:`RequestTimeoutError`; None waits
    :ivar cache_salt: requests share prefix-cache blocks only with requests of the same salt
    :ivar truncation: cut a prompt that is too long at its front instead of refusing it
    :ivar logits_processors: functions that change the logits before each token is chosen, in order
    :ivar enable_thinking: passed to the chat template; None leaves the template's default
    """

    sampling: SamplingParams | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    truncation: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    enable_thinking: bool | None = None


@frozen
class RequestBuilder:
    """Builds a chat request; every call returns a new builder.

    Messages alone are greedy; with :meth:`with_sampling`, what is unset there comes from generation_config.json.
    """

    messages: tuple[Message, ...] = ()
    options: RequestOptions = field(factory=RequestOptions)

    @classmethod
    def from_messages(cls, messages: TextMessages | Sequence[MessageLike]) -> RequestBuilder:
        """Make a builder that starts from a conversation.

        :raises InvalidRequestError: for a malformed message
        """
        if isinstance(messages, TextMessages):
            return cls(messages.messages)
        return cls(parse_messages(messages))

    def add_message(self, role: TextMessageRole | str, content: str) -> RequestBuilder:
        message = Message.parse({"role": role, "content": content})
        return evolve(self, messages=(*self.messages, message))

    def with_sampling(self, sampling: SamplingParams) -> RequestBuilder:
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequestError.of("sampling", sampling, "SamplingParams")
        return self._with(sampling=sampling)

    def with_logprobs(self, top_n: int = 0) -> RequestBuilder:
        """Return each token's logprob, and the ``top_n`` likeliest ones'."""
        greedy = SamplingParams.deterministic()
        return self._with(sampling=evolve(self.options.sampling or greedy, top_n_logprobs=top_n))

    def with_priority(self, priority: int) -> RequestBuilder:
        """Set the priority: higher ones go first, equal ones in the order of arrival."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError.of("priority", priority, "an int")
        return self._with(priority=priority)

    def with_timeout(self, seconds: float) -> RequestBuilder:
        """Give up after that long with :class:`RequestTimeoutError`, which holds the partial response."""
        if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
            raise InvalidRequestError.of("timeout", seconds, "a finite number of seconds > 0")
        return self._with(timeout=float(seconds))

    def with_cache_salt(self, salt: str) -> RequestBuilder:
        """Share prefix-cache blocks only with requests of the same salt."""
        if not isinstance(salt, str) or not salt:
            raise InvalidRequestError.of("cache_salt", salt, "a non-empty string")
        return self._with(cache_salt=salt)

    def with_truncation(self) -> RequestBuilder:
        """Cut a prompt that is too long at its front instead of refusing it."""
        return self._with(truncation=True)

    def with_logits_processors(self, *processors: LogitsProcessor) -> RequestBuilder:
        """Let functions change the logits before each token is chosen, instead of those named before.

        :param processors: in order; see :class:`LogitsProcessor`
        :raises InvalidRequestError: one is not a function of two arguments
        """
        check_logits_processors(processors)
        return self._with(logits_processors=processors)

    def with_enable_thinking(self, enable: bool) -> RequestBuilder:
        """Set what the chat template gets as ``enable_thinking``."""
        return self._with(enable_thinking=bool(enable))

    def _with(self, **changes: Any) -> RequestBuilder:
        return evolve(self, options=evolve(self.options, **changes))


ChatRequestLike: TypeAlias = TextMessages | RequestBuilder | Sequence[MessageLike]
PromptLike: TypeAlias = str | Sequence[int]
"""A completion's prompt: text, or token ids."""


def as_request(request: ChatRequestLike) -> RequestBuilder:
    """Read a request in any accepted form, and check that it holds at least one message.

    :raises InvalidRequestError: for no message, an unknown role or a malformed message
    """
    if isinstance(request, RequestBuilder):
        parse_messages(request.messages)
        return request
    if isinstance(request, TextMessages):
        return RequestBuilder(parse_messages(request.messages))
    return RequestBuilder(parse_messages(request))


class CompletionOptions(TypedDict, total=False):
    """Names the keyword arguments of plain-text completions. They mean what the calls of :class:`RequestBuilder` do.

    :ivar priority: higher goes first; equal ones in order of arrival
    :ivar timeout: seconds until :class:`RequestTimeoutError`; None waits
    :ivar cache_salt: share prefix-cache blocks only with requests of the same salt; None: with all that have none
    :ivar truncation: cut a prompt that is too long at its front instead of refusing it
    :ivar logits_processors: functions that change the logits before each token is chosen, in order
    """

    priority: int
    timeout: float | None
    cache_salt: str | None
    truncation: bool
    logits_processors: Sequence[LogitsProcessor]


def completion_options(sampling: SamplingParams | None, options: CompletionOptions) -> RequestOptions:
    """Check what a completion says beside its prompt.

    :raises InvalidRequestError: an option that does not exist, or a value that cannot be used
    """
    for name in options.keys() - CompletionOptions.__annotations__.keys():
        raise InvalidRequestError.of("option", name, "one of " + ", ".join(CompletionOptions.__annotations__))
    builder = RequestBuilder()
    if sampling is not None:
        builder = builder.with_sampling(sampling)
    if (timeout := options.get("timeout")) is not None:
        builder = builder.with_timeout(timeout)
    if (salt := options.get("cache_salt")) is not None:
        builder = builder.with_cache_salt(salt)
    truncation = options.get("truncation", False)
    if not isinstance(truncation, bool):
        raise InvalidRequestError.of("truncation", truncation, "True or False")
    if truncation:
        builder = builder.with_truncation()
    processors = options.get("logits_processors", ())
    if isinstance(processors, str | bytes) or not isinstance(processors, Sequence):
        raise InvalidRequestError.of("logits_processors", processors, "a list of functions")
    return builder.with_priority(options.get("priority", 0)).with_logits_processors(*processors).options
