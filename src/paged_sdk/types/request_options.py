"""Hold a request's options: everything but its messages or texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from attrs import Attribute, field, frozen

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
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.logits_processor import AnyLogitsProcessor, check_logits_processors
from paged_sdk.types.tool import Tool, ToolChoice, as_tool_choice, as_tools

__all__ = [
    "CompletionOptions",
    "ReadingOptions",
    "RequestOptions",
    "completion_options",
    "of_request",
    "reading_options",
]


def of_request(check: Callable[[object, Attribute[Any], object], None]) -> Callable[..., None]:
    """Wrap a setting's validator for a field of a request, so that it raises :class:`InvalidRequestError`."""

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
    """Return the text of a prediction, which may be in OpenAI's form."""
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
    # Restricted, because it is written into the prompt, where other text could pose as something else.
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
    :ivar constraint: the language that all output has to be in; beside tools that may be called, a JSON schema is that
        of answers without calls
    :ivar enable_thinking: passed to the chat template; None leaves the template's default
    :ivar reasoning_effort: passed to the chat template; None leaves the template's default
    :ivar thinking_budget: tokens after which reasoning is ended; None: no limit
    :ivar tools: the tools that the model may call
    :ivar tool_choice: whether it has to: see :meth:`RequestBuilder.with_tools`
    :ivar must_answer: whether the constraint is that of all answers: the model is told of the tools, and calls none
    :ivar continue_final_message: whether the last message is the beginning of the answer
    :ivar special_tokens_in_content: whether special tokens in messages are interpreted; otherwise they are text
    :ivar logprobs: what :meth:`RequestBuilder.with_logprobs` asked for, which other sampling settings do not change
    :raises InvalidRequestError: at construction
    """

    sampling: SamplingParams | None = field(
        default=None, validator=of_request(IsA(SamplingParams, "SamplingParams", optional=True))
    )
    priority: int = field(default=0, converter=as_int, validator=of_request(IsInt()))
    timeout: float | None = field(
        default=None,
        converter=as_optional_float,
        validator=of_request(NumberBetween(0, low_open=True, optional=True)),
    )
    cache_salt: str | None = field(default=None, validator=of_request(IsText(optional=True)))
    truncation: bool = field(default=False, validator=of_request(is_bool))
    logits_processors: tuple[AnyLogitsProcessor, ...] = field(default=(), converter=_processors)
    prediction: str | None = field(default=None, converter=_prediction)
    adapter: str | None = field(default=None, validator=of_request(IsText(optional=True)))
    constraint: Constraint | None = field(
        default=None, validator=of_request(IsA(Constraint, "Constraint", optional=True))
    )
    enable_thinking: bool | None = field(default=None, validator=of_request(is_optional_bool))
    reasoning_effort: str | None = field(default=None, validator=_is_effort)
    thinking_budget: int | None = field(
        default=None, converter=as_optional_int, validator=of_request(IntAtLeast(1, optional=True))
    )
    tools: tuple[Tool, ...] = field(default=(), converter=as_tools)
    tool_choice: ToolChoice = field(default="auto")
    must_answer: bool = field(default=False, validator=of_request(is_bool))
    continue_final_message: bool = field(default=False, validator=of_request(is_bool))
    special_tokens_in_content: bool = field(default=False, validator=of_request(is_bool))
    logprobs: int | None = field(
        default=None, converter=as_optional_int, validator=of_request(IntAtLeast(0, optional=True))
    )

    @tool_choice.validator
    def _is_choice(self, attribute: object, value: object) -> None:
        if as_tool_choice(value, self.tools) not in ("auto", "none") and self.constraint is not None:
            raise InvalidRequestError.of("tool_choice", value, '"auto" or "none" beside a constraint')

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the model is told about."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Return the tools of which the model has to call one; empty if it need not call any."""
        choice = as_tool_choice(self.tool_choice, self.tools)
        if choice in ("auto", "none"):
            return ()
        return tuple(tool for tool in self.tools if choice in ("required", tool.name))

    @property
    def answer_form(self) -> AnswerForm:
        """Return what the answer may be."""
        if self.forced_tools:
            return AnswerForm.CALLS
        if self.constraint is None:
            return AnswerForm.STRICT_CALLS if any(tool.strict for tool in self.shown_tools) else AnswerForm.FREE
        may_call = bool(self.shown_tools) and not self.must_answer
        return (
            AnswerForm.CALLS_OR_JSON if may_call and self.constraint.kind == "json_schema" else AnswerForm.CONSTRAINED
        )

    @property
    def constraint_kind(self) -> str:
        """Return the kind of grammar that constrains the output, for errors: the constraint's, or "tools" if only calls
        are constrained; empty if there is none.
        """
        if self.constraint is not None:
            return self.constraint.kind
        return "" if self.answer_form is AnswerForm.FREE else "tools"


class CompletionOptions(TypedDict, total=False):
    """Names the keyword arguments of plain-text completions. They mean the same as the methods of
    :class:`~paged_sdk.RequestBuilder`.

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
    """Return the checked options of a completion.

    :raises InvalidRequestError: an unknown option, or an invalid value
    """
    for name in options.keys() - CompletionOptions.__annotations__.keys():
        allowed = "one of " + ", ".join(CompletionOptions.__annotations__) + "; SamplingParams hold how to sample"
        raise InvalidRequestError.of("option", name, allowed)
    return RequestOptions(sampling=sampling, **options)


class ReadingOptions(TypedDict, total=False):
    """Names the keyword arguments of :meth:`Model.embed`, :meth:`Model.score` and :meth:`Model.rank`. They mean the
    same as the methods of :class:`~paged_sdk.RequestBuilder`.

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
    """Return the checked options of a request for embeddings, scores or a ranking.

    :raises InvalidRequestError: an unknown option, or an invalid value
    """
    for name in options.keys() - ReadingOptions.__annotations__.keys():
        raise InvalidRequestError.of("option", name, "one of " + ", ".join(ReadingOptions.__annotations__))
    return RequestOptions(**options)
