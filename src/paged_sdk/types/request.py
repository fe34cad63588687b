"""Hold a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from attrs import evolve, field, frozen

from paged_sdk.config.checks import IsA
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.logits_processor import AnyLogitsProcessor
from paged_sdk.types.messages import (
    Message,
    MessageLike,
    MessageList,
    TextMessageRole,
    TextMessages,
    parse_messages,
)
from paged_sdk.types.request_options import RequestOptions, of_request
from paged_sdk.types.tool import ToolChoice, ToolLike

__all__ = ["ChatRequestLike", "RequestBuilder", "as_request"]


_T = TypeVar("_T")


@frozen
class RequestBuilder(MessageList):
    """Builds a chat request; every call returns a new builder.

    Without :meth:`with_sampling`, a request is greedy; with it, unset parameters come from generation_config.json.
    """

    options: RequestOptions = field(factory=RequestOptions, validator=of_request(IsA(RequestOptions)))

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
        """End the request with :class:`RequestTimeoutError`, which holds the partial response, after this many seconds.

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
        """Constrain the output to a JSON schema, a regular expression or a grammar. Beside tools that may be called, a
        JSON schema constrains only the answers that call none.

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
        """End the model's reasoning after this many tokens, the opening marker included, or a few more to complete a
        character: the closing marker follows, and then the answer. It has no effect on models that do not reason, nor
        on answers without reasoning, which are those of a constraint alone and required calls.

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
    """Return a value, which must not be None: that means that an option is unset."""
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
        # Of an object with add_message, the call's result was most likely not kept.
        returned = "" if isinstance(request, Sequence) else " (add_message returns a new object, with the message)"
        raise InvalidRequestError.of("messages", [], f"at least one message{returned}")
    if built.options.continue_final_message:
        _check_begun_answer(built.messages[-1], built.options)
    return built


def _check_begun_answer(message: Message, options: RequestOptions) -> None:
    """Check that a message is the beginning of an answer, and that the rest can follow it."""
    is_text = message.content and not message.images and not message.tool_calls
    if message.role is not TextMessageRole.ASSISTANT or not is_text:
        allowed = "a last message of the role assistant that has text and no tool calls"
        raise InvalidRequestError.of("messages", message.to_dict(), allowed)
    if options.shown_tools:
        names = [tool.name for tool in options.shown_tools]
        raise InvalidRequestError.of("tools", names, "no tools: the answer to be continued is text")
    if options.enable_thinking:
        raise InvalidRequestError.of("enable_thinking", True, "False or None: the answer to be continued is text")
