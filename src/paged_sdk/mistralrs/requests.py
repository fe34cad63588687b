"""Define what a runner can be asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal

from attrs import evolve, field, frozen

from paged_sdk import Constraint, InvalidRequestError, RequestBuilder, SamplingParams, Tool
from paged_sdk.mistralrs.unsupported import is_optional_count, is_optional_text, is_switch, is_text, unsupported
from paged_sdk.wire.sampling import constraint_of, dry_params, top_n_logprobs

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # Tells type checkers what a runner returns: a request that does not say that it streams does not.
    StreamT = TypeVar("StreamT", bound=bool, default=Literal[False])
else:
    from typing import TypeVar

    StreamT = TypeVar("StreamT", bound=bool)

__all__ = ["ChatCompletionRequest", "CompletionRequest", "StreamT", "ToolChoice"]


class ToolChoice(Enum):
    """Says whether a model may call tools."""

    NoTools = "none"
    Auto = "auto"


@frozen(kw_only=True)
class _Request:
    """Holds what both kinds of request can say. None leaves a setting to the checkpoint's generation_config.json.

    :ivar max_tokens: tokens to generate at most; None: until the end token or the context's end
    :ivar logit_bias: token id to a number added to its logit
    :ivar stop_seqs: strings that end the text
    :ivar grammar: a language that every text is a sentence of, described as
    :ivar grammar_type: "regex", "lark", "json_schema" or "llguidance"
    :ivar adapter: the alias of the adapter that the texts go through; None: none
    :ivar dry_multiplier: strength of DRY repetition control; None is off
    :ivar truncate_sequence: whether to cut a prompt that is too long at its front instead of refusing it
    :ivar ignore_eos: whether to go on past the end token
    """

    n_choices: int = 1
    max_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_seqs: Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    grammar: str | None = field(default=None, validator=is_optional_text)
    grammar_type: str | None = field(default=None, validator=is_optional_text)
    adapter: str | None = field(default=None, validator=is_optional_text)
    truncate_sequence: bool = field(default=False, validator=is_switch)
    ignore_eos: bool = False

    def sampling(self, *, seed: int | None, default_temperature: float | None) -> SamplingParams:
        """Return how the next token is chosen.

        As in mistral.rs a request that says nothing about it is greedy, unless the checkpoint's generation_config.json
        samples.

        :param seed: None draws one
        :param default_temperature: the checkpoint's temperature
        :raises ConfigError: a value out of its range
        :raises InvalidRequestError: settings of DRY without its multiplier
        """
        says = (self.temperature, self.top_p, self.top_k, self.min_p, default_temperature)
        return SamplingParams(
            temperature=0.0 if all(value is None for value in says) else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=0.0 if self.frequency_penalty is None else self.frequency_penalty,
            presence_penalty=0.0 if self.presence_penalty is None else self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            max_len=self.max_tokens,
            stop=self.stop_seqs,
            ignore_eos=self.ignore_eos,
            logits_bias=self.logit_bias,
            n_choices=self.n_choices,
            top_n_logprobs=self._top_n_logprobs(),
            seed=seed,
            dry_params=dry_params(
                multiplier=self.dry_multiplier,
                base=self.dry_base,
                allowed_length=self.dry_allowed_length,
                sequence_breakers=self.dry_sequence_breakers,
            ),
        )

    def constraint(self) -> Constraint | None:
        """Return the language that every text is a sentence of.

        :raises InvalidRequestError: a grammar without its type, or the other way round, or a type that there is none of
        :raises ConstraintError: no text, or one that is too long
        """
        if self.grammar is None and self.grammar_type is None:
            return None
        if self.grammar is None or self.grammar_type is None:
            missing = "grammar" if self.grammar is None else "grammar_type"
            raise InvalidRequestError.of(missing, None, "both grammar and grammar_type, or none")
        return constraint_of(self.grammar_type, self.grammar, field="grammar_type")

    def _top_n_logprobs(self) -> int | None:
        return None


@frozen
class ChatCompletionRequest(_Request, Generic[StreamT]):
    """Asks to continue a conversation.

    :ivar messages: ``{"role": ..., "content": ...}`` mappings, or a text that a user says
    :ivar model: a label; a runner holds one model
    :ivar logprobs: whether to return each token's logprob
    :ivar top_logprobs: how many of the likeliest tokens to return beside it (1, if not given)
    :ivar stream: whether to return an iterator of chunks
    :ivar enable_thinking: given to the chat template
    :ivar reasoning_effort: likewise
    :ivar tool_schemas: tools that the model may call, each as JSON text in OpenAI's form
    :ivar tool_choice: whether it may call them; None: it may
    :ivar max_tool_rounds: how often tools with callbacks of the runner's are run at most; None: 8 times
    """

    messages: str | Sequence[Mapping[str, object]]
    model: str = field(validator=is_text)
    logprobs: bool = field(default=False, validator=is_switch, kw_only=True)
    top_logprobs: int | None = field(default=None, kw_only=True)
    stream: StreamT = field(default=False, validator=is_switch, kw_only=True)  # type: ignore[assignment]  # StreamT's default
    enable_thinking: bool | None = field(default=None, kw_only=True)
    reasoning_effort: str | None = field(default=None, kw_only=True)
    tool_schemas: Sequence[str] | None = field(default=None, kw_only=True)
    tool_choice: ToolChoice | None = field(default=None, kw_only=True)
    web_search_options: None = unsupported()
    max_tool_rounds: int | None = field(default=None, validator=is_optional_count, kw_only=True)
    tool_dispatch_url: None = unsupported()
    enable_code_execution: bool = unsupported(default=False)
    enable_shell: bool = unsupported(default=False)
    shell_skills: None = unsupported()
    agent_permission: None = unsupported()
    agent_approval_callback: None = unsupported()
    code_execution_permission: None = unsupported()
    session_id: None = unsupported()
    files: None = unsupported()
    input_files: None = unsupported()

    def build(
        self,
        *,
        seed: int | None,
        default_temperature: float | None,
        callbacks: Mapping[str, Callable[[str, dict[str, Any]], str]] | None = None,
    ) -> RequestBuilder:
        """Return the request that the model takes; other parameters are as in :meth:`sampling`.

        :param callbacks: functions by the names of the tools that they do
        :raises ConfigError: a sampling value out of its range
        :raises InvalidRequestError: malformed messages, or fields that contradict each other
        """
        says = [{"role": "user", "content": self.messages}] if isinstance(self.messages, str) else self.messages
        builder = RequestBuilder.from_messages(says).with_sampling(
            self.sampling(seed=seed, default_temperature=default_temperature)
        )
        if self.enable_thinking is not None:
            builder = builder.with_enable_thinking(self.enable_thinking)
        if self.reasoning_effort is not None:
            builder = builder.with_reasoning_effort(self.reasoning_effort)
        constraint = self.constraint()
        if constraint is not None:
            builder = builder.with_constraint(constraint)
        if self.adapter is not None:
            builder = builder.with_adapter(self.adapter)
        builder = builder.with_tools(self._tools(callbacks), self._choice())
        return builder.with_truncation() if self.truncate_sequence else builder

    def _tools(self, callbacks: Mapping[str, Callable[[str, dict[str, Any]], str]] | None) -> list[Tool]:
        schemas = () if self.tool_schemas is None else self.tool_schemas
        if isinstance(schemas, str) or not isinstance(schemas, Sequence):
            raise InvalidRequestError.of("tool_schemas", schemas, "a list of JSON texts")
        tools = []
        for schema in schemas:
            try:
                described = json.loads(schema)
            except (TypeError, ValueError, RecursionError):
                raise InvalidRequestError.of("tool_schemas", schema, "JSON text of a tool") from None
            if not isinstance(described, dict) or not described:
                raise InvalidRequestError.of("tool_schemas", schema, "JSON text of a tool")
            tool = Tool.parse(described)
            callback = (callbacks or {}).get(tool.name)
            tools.append(tool if callback is None else evolve(tool, function=_called_back(callback, tool.name)))
        return tools

    def _choice(self) -> str:
        if self.tool_choice is not None and not isinstance(self.tool_choice, ToolChoice):
            raise InvalidRequestError.of("tool_choice", self.tool_choice, "ToolChoice.Auto, ToolChoice.NoTools or None")
        return "none" if self.tool_choice is ToolChoice.NoTools else "auto"

    def _top_n_logprobs(self) -> int | None:
        return top_n_logprobs(self.logprobs, self.top_logprobs, default=1)


@frozen
class CompletionRequest(_Request):
    """Asks to continue a text, without a chat template.

    :ivar prompt: the text
    :ivar model: a label; a runner holds one model
    :ivar echo_prompt: whether to begin every choice's text with the prompt
    """

    prompt: str = field(validator=is_text)
    model: str = field(validator=is_text)
    echo_prompt: bool = field(default=False, validator=is_switch, kw_only=True)
    best_of: int | None = field(default=None, kw_only=True)
    tool_schemas: None = unsupported()
    tool_choice: None = unsupported()
    suffix: None = unsupported()

    @best_of.validator
    def _is_one(self, attribute: object, value: object) -> None:
        if value is not None and (type(value) is not int or value != 1):
            raise InvalidRequestError.of("best_of", value, "1 or None: this version does not rank texts")


def _called_back(callback: Callable[[str, dict[str, Any]], str], name: str) -> Callable[..., str]:
    """Return a function of a tool's arguments."""

    def call(**arguments: Any) -> str:
        return callback(name, arguments)

    return call
