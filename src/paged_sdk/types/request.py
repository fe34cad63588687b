"""Hold a chat request and its options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from attrs import Attribute, evolve, field, frozen

from paged_sdk.config.checks import (
    IntAtLeast,
    IsA,
    IsInt,
    IsText,
    NumberBetween,
    as_int,
    as_optional_float,
    as_optional_int,
    is_bool,
    is_optional_bool,
    is_unicode,
)
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import ConfigError, InvalidRequestError
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.logits_processor import AnyLogitsProcessor, check_logits_processors
from paged_sdk.types.messages import (
    Message,
    MessageLike,
    MessageList,
    TextMessageRole,
    TextMessages,
    parse_messages,
)
from paged_sdk.types.tool import Tool, ToolChoice, ToolLike, as_tool_choice, as_tools

__all__ = [
    "ChatRequestLike",
    "CompletionOptions",
    "ReadingOptions",
    "RequestBuilder",
    "RequestOptions",
    "as_request",
    "completion_options",
    "reading_options",
]


_T = TypeVar("_T")


def _of_request(check: Callable[[object, Attribute[Any], object], None]) -> Callable[..., None]:
    """Return a setting's validator as one of a request's field, which has the request's error."""

    def validate(instance: object, attribute: Attribute[Any], value: object) -> None:
        try:
            check(instance, attribute, value)
        except ConfigError as error:
            raise InvalidRequestError.of(attribute.name, value, error.allowed) from None

    return validate


def _processors(value: Iterable[AnyLogitsProcessor]) -> tuple[AnyLogitsProcessor, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError.of("logits_processors", value, "a list of functions")
    processors = tuple(value)
    check_logits_processors(processors)
    return processors


def _prediction(value: object) -> str | None:
    """Return the text of a prediction, which may be given as OpenAI's API has it."""
    text = value
    if isinstance(value, Mapping):
        if value.keys() != {"type", "content"} or value["type"] != "content":
            raise InvalidRequestError.of("prediction", value, '{"type": "content", "content": text}')
        text = value["content"]
        if isinstance(text, Sequence) and not isinstance(text, str | bytes):
            text = "".join(_text_part(part) for part in text)
    if value is None:
        return None
    if not isinstance(text, str) or not text or not is_unicode(text):
        raise InvalidRequestError.of("prediction", value, "a text of at least one character")
    return text


def _text_part(part: object) -> str:
    allowed = 'parts {"type": "text", "text": ...}'
    if not isinstance(part, Mapping) or part.keys() != {"type", "text"} or part["type"] != "text":
        raise InvalidRequestError.of("prediction", part, allowed)
    text = part["text"]
    if not isinstance(text, str):
        raise InvalidRequestError.of("prediction", text, allowed)
    return text


def _is_effort(instance: object, attribute: Attribute[Any], value: object) -> None:
    # Not any text: it is written into the prompt, where it could pose as something else.
    if value is not None and not (isinstance(value, str) and re.fullmatch("[A-Za-z0-9_-]{1,32}", value)):
        raise InvalidRequestError.of("reasoning_effort", value, "a word such as 'low', 'medium' or 'high'")


@frozen(kw_only=True)
class RequestOptions:
    """Holds the options of a request.

    :ivar sampling: None is greedy
    :ivar priority: higher goes first; equal ones in order of arrival
    :ivar timeout: seconds until :class:`RequestTimeoutError`; None: no timeout
    :ivar cache_salt: share prefix-cache blocks only with requests of the same salt
    :ivar truncation: cut a prompt that is too long at its front instead of refusing it
    :ivar logits_processors: functions that change the logits before each token is chosen, in order
    :ivar prediction: the expected answer, which makes it faster without changing it
    :ivar adapter: the name of a loaded adapter to use; None: none
    :ivar constraint: the language that all output has to be in
    :ivar enable_thinking: passed to the chat template; None leaves the template's default
    :ivar reasoning_effort: passed to the chat template; None leaves the template's default
    :ivar thinking_budget: tokens after which reasoning is ended; None: no limit
    :ivar tools: the tools that the model may call
    :ivar tool_choice: whether it has to: see :meth:`RequestBuilder.with_tools`
    :ivar continue_final_message: whether the last message is the beginning of the answer
    :ivar special_tokens_in_content: whether special tokens in messages are interpreted; otherwise they are text
    :ivar logprobs: what :meth:`RequestBuilder.with_logprobs` asked for, which other sampling settings do not change
    :raises InvalidRequestError: at construction
    """

    sampling: SamplingParams | None = field(
        default=None, validator=_of_request(IsA(SamplingParams, "SamplingParams", optional=True))
    )
    priority: int = field(default=0, converter=as_int, validator=_of_request(IsInt()))
    timeout: float | None = field(
        default=None,
        converter=as_optional_float,
        validator=_of_request(NumberBetween(0, low_open=True, optional=True)),
    )
    cache_salt: str | None = field(default=None, validator=_of_request(IsText(optional=True)))
    truncation: bool = field(default=False, validator=_of_request(is_bool))
    logits_processors: tuple[AnyLogitsProcessor, ...] = field(default=(), converter=_processors)
    prediction: str | None = field(default=None, converter=_prediction)
    adapter: str | None = field(default=None, validator=_of_request(IsText(optional=True)))
    constraint: Constraint | None = field(
        default=None, validator=_of_request(IsA(Constraint, "Constraint", optional=True))
    )
    enable_thinking: bool | None = field(default=None, validator=_of_request(is_optional_bool))
    reasoning_effort: str | None = field(default=None, validator=_is_effort)
    thinking_budget: int | None = field(
        default=None, converter=as_optional_int, validator=_of_request(IntAtLeast(1, optional=True))
    )
    tools: tuple[Tool, ...] = field(default=(), converter=as_tools)
    tool_choice: ToolChoice = field(default="auto")
    continue_final_message: bool = field(default=False, validator=_of_request(is_bool))
    special_tokens_in_content: bool = field(default=False, validator=_of_request(is_bool))
    logprobs: int | None = field(
        default=None, converter=as_optional_int, validator=_of_request(IntAtLeast(0, optional=True))
    )

    @tool_choice.validator
    def _is_choice(self, attribute: object, value: object) -> None:
        if as_tool_choice(value, self.tools) not in ("auto", "none") and self.constraint is not None:
            raise InvalidRequestError.of("tool_choice", value, '"auto" or "none" beside a constraint')

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Return the tools of which the model has to call one; none: it may answer as it likes."""
        choice = as_tool_choice(self.tool_choice, self.tools)
        if choice in ("auto", "none"):
            return ()
        return tuple(tool for tool in self.tools if choice in ("required", tool.name))

    @property
    def is_strict(self) -> bool:
        """Tell whether the model may say what it likes, and calls that it makes are held to their tools' schemas."""
        may_call = not self.forced_tools and self.constraint is None
        return may_call and any(tool.strict for tool in self.shown_tools)

    @property
    def constraint_kind(self) -> str:
        """Return what kind of grammar every text is a sentence of: a constraint's, or "tools" where calls are held to
        one; empty: any text may come.
        """
        if self.forced_tools or self.is_strict:
            return "tools"
        return "" if self.constraint is None else self.constraint.kind


@frozen
class RequestBuilder(MessageList):
    """Builds a chat request; every call returns a new builder.

    Without :meth:`with_sampling`, a request is greedy; with it, unset parameters come from generation_config.json.
    """

    options: RequestOptions = field(factory=RequestOptions, validator=_of_request(IsA(RequestOptions)))

    @classmethod
    def from_messages(cls, messages: TextMessages | Sequence[MessageLike]) -> RequestBuilder:
        """Make a builder that starts with a conversation.

        :raises InvalidRequestError: for a malformed message
        """
        return cls(messages if isinstance(messages, TextMessages) else parse_messages(messages))

    def with_sampling(self, sampling: SamplingParams) -> RequestBuilder:
        """Set how tokens are chosen. It does not change what :meth:`with_logprobs` asked for.

        :raises InvalidRequestError: for anything but :class:`SamplingParams`
        """
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequestError.of("sampling", sampling, "SamplingParams")
        top_n = self.options.logprobs
        return self._with(sampling=sampling if top_n is None else evolve(sampling, top_n_logprobs=top_n))

    def with_logprobs(self, top_n: int = 0) -> RequestBuilder:
        """Return each token's logprob and those of the ``top_n`` likeliest tokens, whatever the sampling settings say.

        :raises InvalidRequestError: for anything but an int >= 0
        """
        if top_n is None:
            raise InvalidRequestError.of("logprobs", top_n, "an int >= 0")
        options = evolve(self.options, logprobs=top_n)
        sampling = evolve(self.options.sampling or SamplingParams.deterministic(), top_n_logprobs=top_n)
        return evolve(self, options=evolve(options, sampling=sampling))

    def with_priority(self, priority: int) -> RequestBuilder:
        """Set the priority: higher ones go first, equal ones in the order of arrival.

        :raises InvalidRequestError: for anything but an int
        """
        return self._with(priority=priority)

    def with_timeout(self, seconds: float) -> RequestBuilder:
        """End the request with :class:`RequestTimeoutError`, which holds the partial response, after so many seconds.

        :raises InvalidRequestError: for anything but a finite number of seconds > 0
        """
        return self._with(timeout=_given("timeout", seconds))

    def with_cache_salt(self, salt: str) -> RequestBuilder:
        """Share prefix-cache blocks only with requests of the same salt.

        :raises InvalidRequestError: for anything but a non-empty string of Unicode characters
        """
        return self._with(cache_salt=_given("cache_salt", salt))

    def with_truncation(self) -> RequestBuilder:
        """Cut a prompt that is too long at its front instead of refusing it.

        Room is left for ``max_len`` answer tokens, up to half of the context; without ``max_len``, for a quarter of the
        context, up to 4,096 tokens.
        """
        return self._with(truncation=True)

    def with_continue_final_message(self) -> RequestBuilder:
        """Have the model continue the last message, an assistant's: the beginning of an answer, or one that was cut
        off.

        The response is the continuation, without reasoning, which would come before the text. A constraint applies to
        the continuation.

        :raises InvalidRequestError: when the request is sent, if the last message is not the assistant's, has no text,
            or calls tools; with callable tools; and with ``with_enable_thinking(True)``
        """
        return self._with(continue_final_message=True)

    def with_special_tokens_in_content(self) -> RequestBuilder:
        """Interpret special tokens in messages, such as ``<|im_end|>``, instead of treating them as text.

        Only for messages that the application itself has written: whoever writes such a token can end a turn and begin
        another.
        """
        return self._with(special_tokens_in_content=True)

    def with_logits_processors(self, *processors: AnyLogitsProcessor) -> RequestBuilder:
        """Let functions change the logits before each token is chosen. Replaces earlier ones.

        :param processors: in order; see :class:`LogitsProcessor` and :class:`BatchLogitsProcessor`
        :raises InvalidRequestError: one is not a function of two arguments
        """
        return self._with(logits_processors=processors)

    def with_prediction(self, prediction: str | Mapping[str, object]) -> RequestBuilder:
        """Pass the expected answer: the more of it is right, the faster the answer comes, without changing it. For an
        edit, that is the text to be edited.

        :param prediction: a text, or in OpenAI's form: ``{"type": "content", "content": ...}``
        :raises InvalidRequestError: for anything else, and for an empty text; when the request is sent, with several
            choices or if it is longer than the model's context
        """
        return self._with(prediction=_given("prediction", prediction))

    def with_constraint(self, constraint: Constraint) -> RequestBuilder:
        """Constrain the output to a JSON schema, a regular expression or a grammar.

        Finish reason "stop" means that the output is complete, "length" that it was cut off. A stop string ends it
        anywhere.

        :raises InvalidRequestError: for anything but a :class:`Constraint`
        """
        return self._with(constraint=_given("constraint", constraint))

    def with_adapter(self, name: str) -> RequestBuilder:
        """Use a loaded LoRA adapter.

        :param name: one of :attr:`Model.adapters <paged_sdk.Model.adapters>`
        :raises InvalidRequestError: for anything but a non-empty string; when the request is sent, for an unknown name
        """
        return self._with(adapter=_given("adapter", name))

    def with_enable_thinking(self, enable: bool) -> RequestBuilder:
        """Set the chat template's variable ``enable_thinking``. Templates that do not use it ignore it.

        :raises InvalidRequestError: for anything but True or False
        """
        return self._with(enable_thinking=_given("enable_thinking", enable))

    def with_reasoning_effort(self, effort: str) -> RequestBuilder:
        """Set the chat template's variable ``reasoning_effort``: "low", "medium" or "high" for most that use it; others
        ignore it.

        :raises InvalidRequestError: for anything but a word of up to 32 letters, digits, hyphens and underscores
        """
        return self._with(reasoning_effort=_given("reasoning_effort", effort))

    def with_thinking_budget(self, tokens: int) -> RequestBuilder:
        """End the model's reasoning after so many tokens, the opening marker included: the closing marker follows, and
        then the answer. It has no effect on models that do not reason, nor on constrained answers, which have no
        reasoning.

        :raises InvalidRequestError: for anything but an int >= 1; use :meth:`with_enable_thinking` to turn reasoning
            off
        """
        return self._with(thinking_budget=_given("thinking_budget", tokens))

    def with_tools(self, tools: Iterable[ToolLike], choice: ToolChoice = "auto") -> RequestBuilder:
        """Let the model call tools. Replaces earlier ones.

        :param tools: each a :class:`Tool`, a typed function (see :meth:`Tool.from_function`), or a mapping in OpenAI's
            form
        :param choice: "auto": the model decides; "none": the model does not see the tools; "required": it has to call
            one; the name of a tool, or ``{"type": "function", "function": {"name": ...}}``: it has to call that one. A
            required call's arguments are constrained to the tool's schema
        :raises InvalidRequestError: a malformed tool, two of one name, more than 256 or 262,144 characters of them, or
            another choice
        """
        return self._with(tools=tools, tool_choice=choice)

    def _with(self, **changes: Any) -> RequestBuilder:
        return evolve(self, options=evolve(self.options, **changes))


def _given(name: str, value: _T) -> _T:
    """Return a value that may not be None, which an option is when nothing was said about it."""
    if value is None:
        raise InvalidRequestError.of(name, value, "a value: leave the call out for the default")
    return value


ChatRequestLike: TypeAlias = TextMessages | RequestBuilder | Sequence[MessageLike]


def as_request(request: ChatRequestLike) -> RequestBuilder:
    """Read a request in any accepted form, and check that it holds at least one message.

    :raises InvalidRequestError: for no message, an unknown role or a malformed message
    """
    built = request if isinstance(request, RequestBuilder) else RequestBuilder.from_messages(request)
    if not built.messages:
        raise InvalidRequestError.of("messages", [], "at least one message")
    if built.options.continue_final_message:
        _check_begun_answer(built.messages[-1], built.options)
    return built


def _check_begun_answer(message: Message, options: RequestOptions) -> None:
    """Check that a message is the beginning of an answer, and that the rest may follow it."""
    is_text = message.content and not message.images and not message.tool_calls
    if message.role is not TextMessageRole.ASSISTANT or not is_text:
        allowed = "a last message of the assistant's with a text that is to be continued, and no calls"
        raise InvalidRequestError.of("messages", message.to_dict(), allowed)
    if options.shown_tools:
        names = [tool.name for tool in options.shown_tools]
        raise InvalidRequestError.of("tools", names, "none that may be called: an answer that has begun is a text")
    if options.enable_thinking:
        raise InvalidRequestError.of("enable_thinking", True, "False or nothing: an answer that has begun is a text")


class CompletionOptions(TypedDict, total=False):
    """Names the keyword arguments of plain-text completions. They mean the same as the methods of
    :class:`RequestBuilder`.

    :ivar priority: higher goes first; equal ones in order of arrival
    :ivar timeout: seconds until :class:`RequestTimeoutError`; None: no timeout
    :ivar cache_salt: share prefix-cache blocks only with requests of the same salt; None: with all that have none
    :ivar truncation: cut a prompt that is too long at its front instead of refusing it
    :ivar logits_processors: functions that change the logits before each token is chosen, in order
    :ivar prediction: the expected text, which makes it faster without changing it
    :ivar constraint: the language that all output has to be in; None: any
    :ivar adapter: the name of a loaded adapter to use; None: none
    """

    priority: int
    timeout: float | None
    cache_salt: str | None
    truncation: bool
    logits_processors: Sequence[AnyLogitsProcessor]
    prediction: str | None
    constraint: Constraint | None
    adapter: str | None


def completion_options(sampling: SamplingParams | None, options: CompletionOptions) -> RequestOptions:
    """Check what a completion says beside its prompt.

    :raises InvalidRequestError: an option that does not exist, or a value that cannot be used
    """
    for name in options.keys() - CompletionOptions.__annotations__.keys():
        allowed = "one of " + ", ".join(CompletionOptions.__annotations__) + "; SamplingParams hold how to sample"
        raise InvalidRequestError.of("option", name, allowed)
    return RequestOptions(sampling=sampling, **options)


class ReadingOptions(TypedDict, total=False):
    """Names the keyword arguments of :meth:`Model.embed`, :meth:`Model.score` and :meth:`Model.rank`. They mean the
    same as the methods of :class:`RequestBuilder`.

    :ivar priority: higher goes first; equal ones in order of arrival
    :ivar timeout: seconds until :class:`RequestTimeoutError`, for all texts together; None: no timeout
    :ivar cache_salt: share prefix-cache blocks only with requests of the same salt; None: with all that have none
    :ivar adapter: the name of a loaded adapter to use; None: none
    """

    priority: int
    timeout: float | None
    cache_salt: str | None
    adapter: str | None


def reading_options(options: ReadingOptions) -> RequestOptions:
    """Check what such a request says beside its texts.

    :raises InvalidRequestError: an option that does not exist, or a value that cannot be used
    """
    for name in options.keys() - ReadingOptions.__annotations__.keys():
        raise InvalidRequestError.of("option", name, "one of " + ", ".join(ReadingOptions.__annotations__))
    return RequestOptions(**options)
