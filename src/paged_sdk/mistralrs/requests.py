"""Defines the requests to a runner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal

from attrs import field, frozen

from paged_sdk import Constraint, InvalidRequestError, RequestBuilder, SamplingParams, Tool
from paged_sdk.mistralrs.adapters import LoraAdapterGeneration, is_selection
from paged_sdk.mistralrs.enums import ToolChoice
from paged_sdk.mistralrs.images import with_images
from paged_sdk.mistralrs.unsupported import is_optional_count, is_optional_text, is_switch, is_text, unsupported
from paged_sdk.wire.sampling import constraint_of, dry_params, top_n_logprobs

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # Tells type checkers what a runner returns; without ``stream``, a request does not stream.
    StreamT = TypeVar("StreamT", bound=bool, default=Literal[False])
else:
    from typing import TypeVar

    StreamT = TypeVar("StreamT", bound=bool)

__all__ = ["ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "StreamT"]


EFFORTS: Final = ("off", "none", "low", "medium", "high", "xhigh", "max")


@frozen
class ChatCompletionRequest(Generic[StreamT]):
    """Asks to continue a conversation. Unset sampling fields come from the checkpoint's generation_config.json.

    :ivar messages: ``{"role": ..., "content": ...}`` mappings, or the text of a user message. An image in a content's
        parts is a ``data:`` URL or the path of a file
    :ivar model: a label; a runner holds one model
    :ivar logprobs: whether to return each token's logprob
    :ivar logit_bias: token id to a number added to its logit
    :ivar top_logprobs: how many of the likeliest tokens to return with it (1, if not given)
    :ivar max_tokens: maximum number of tokens to generate; None: until the end token or the context's end
    :ivar stop_seqs: strings that end the text
    :ivar stream: whether to return an iterator of chunks
    :ivar grammar: a constraint on the text
    :ivar grammar_type: its kind: "regex", "lark", "json_schema" or "llguidance"
    :ivar tool_schemas: tools that the model may call, each as JSON text in OpenAI's form
    :ivar tool_choice: whether it may call them; None: it may
    :ivar dry_multiplier: strength of DRY repetition control; None is off
    :ivar enable_thinking: passed to the chat template; None: true, for templates that use it
    :ivar truncate_sequence: whether to cut a prompt that is too long at its front instead of refusing it
    :ivar reasoning_effort: "off" turns thinking off; "low", "medium", "high" and "xhigh" turn it on, and are passed to
        the chat template; "none" is "off", and "max" is "xhigh"
    :ivar max_tool_rounds: maximum number of rounds of tools with the runner's callbacks; None: 256. After that, calls
        are returned to the program
    :ivar ignore_eos: whether to continue past the end token
    :ivar adapter: the alias of the adapter to use, or one of its generations; None: none
    """

    messages: str | Sequence[Mapping[str, object]]
    model: str = field(validator=is_text)
    logprobs: bool = field(default=False, validator=is_switch)
    n_choices: int = 1
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int | None = field(default=None, validator=is_optional_count)
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_seqs: Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: StreamT = field(default=False, validator=is_switch)  # type: ignore[assignment]  # StreamT's default
    grammar: str | None = field(default=None, validator=is_optional_text)
    grammar_type: str | None = field(default=None, validator=is_optional_text)
    min_p: float | None = None
    tool_schemas: Sequence[str] | None = None
    tool_choice: ToolChoice | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    web_search_options: None = unsupported()
    enable_thinking: bool | None = None
    truncate_sequence: bool = field(default=False, validator=is_switch)
    reasoning_effort: str | None = None
    max_tool_rounds: int | None = field(default=None, validator=is_optional_count)
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
    ignore_eos: bool = False
    adapter: str | LoraAdapterGeneration | None = field(default=None, validator=is_selection, kw_only=True)

    def build(
        self,
        *,
        seed: int | None,
        default_temperature: float | None,
    ) -> RequestBuilder:
        """Return the SDK's request, without the adapter, which the runner resolves.

        As in mistral.rs, a request without sampling fields is greedy, unless the checkpoint's generation_config.json
        samples.

        :param seed: None: a random one
        :param default_temperature: the checkpoint's temperature
        :raises ConfigError: sampling value out of range
        :raises InvalidRequestError: malformed messages, or fields that contradict each other
        """
        says = [{"role": "user", "content": self.messages}] if isinstance(self.messages, str) else self.messages
        top_n = top_n_logprobs(self.logprobs, self.top_logprobs, default=1)
        builder = RequestBuilder.from_messages(with_images(says)).with_sampling(
            _sampling(self, seed=seed, default_temperature=default_temperature, top_n=top_n)
        )
        thinks, effort = self._reasoning()
        builder = builder.with_enable_thinking(thinks)
        if effort is not None:
            builder = builder.with_reasoning_effort(effort)
        constraint = _constraint(self)
        if constraint is not None:
            builder = builder.with_constraint(constraint)
        builder = builder.with_tools(self._tools(), ToolChoice.parse(self.tool_choice))
        return builder.with_truncation() if self.truncate_sequence else builder

    def _reasoning(self) -> tuple[bool, str | None]:
        """Return whether reasoning is enabled (default: yes), and the effort."""
        given = self.reasoning_effort
        if given is None:
            return self.enable_thinking if self.enable_thinking is not None else True, None
        effort = given.strip().lower() if isinstance(given, str) else None
        if effort not in EFFORTS:
            raise InvalidRequestError.of("reasoning_effort", given, f"one of {', '.join(EFFORTS)}, or None")
        thinks = effort not in ("off", "none")
        if self.enable_thinking is not None and self.enable_thinking is not thinks:
            raise InvalidRequestError.of("reasoning_effort", given, f"nothing beside enable_thinking={not thinks}")
        return thinks, ("xhigh" if effort == "max" else effort) if thinks else None

    def _tools(self) -> list[Tool]:
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
            tools.append(Tool.parse(described))
        return tools


@frozen
class CompletionRequest:
    """Asks to continue a text, without a chat template. Fields that are not explained here are
    :class:`ChatCompletionRequest`'s.

    :ivar prompt: the text
    :ivar model: a label; a runner holds one model
    :ivar best_of: 1: texts are not ranked
    :ivar echo_prompt: whether to begin every choice's text with the prompt
    """

    prompt: str = field(validator=is_text)
    model: str = field(validator=is_text)
    best_of: int | None = field(default=1)
    echo_prompt: bool = field(default=False, validator=is_switch)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = None
    n_choices: int = 1
    stop_seqs: Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    suffix: None = unsupported()
    top_k: int | None = None
    grammar: str | None = field(default=None, validator=is_optional_text)
    grammar_type: str | None = field(default=None, validator=is_optional_text)
    min_p: float | None = None
    tool_schemas: None = unsupported()
    tool_choice: None = unsupported()
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    truncate_sequence: bool = field(default=False, validator=is_switch)
    ignore_eos: bool = False
    adapter: str | LoraAdapterGeneration | None = field(default=None, validator=is_selection, kw_only=True)

    @best_of.validator
    def _is_one(self, attribute: object, value: object) -> None:
        if value is not None and (type(value) is not int or value != 1):
            raise InvalidRequestError.of("best_of", value, "1 or None: this version does not rank texts")

    def sampling(self, *, seed: int | None, default_temperature: float | None) -> SamplingParams:
        """Return the sampling settings; see :meth:`ChatCompletionRequest.build`."""
        return _sampling(self, seed=seed, default_temperature=default_temperature, top_n=None)

    def constraint(self) -> Constraint | None:
        """Return the constraint on every text; None if there is none.

        :raises InvalidRequestError: a grammar without its type or vice versa, or an unknown type
        :raises ConstraintError: the grammar is not text, or too long
        """
        return _constraint(self)


@frozen
class EmbeddingRequest:
    """Asks for embeddings.

    :ivar input: a text or token ids; or a list of either
    :ivar truncate_sequence: whether to cut a text that is too long at its end instead of refusing it
    """

    input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
    truncate_sequence: bool = field(default=False, validator=is_switch)


def _sampling(
    request: ChatCompletionRequest[Any] | CompletionRequest,
    *,
    seed: int | None,
    default_temperature: float | None,
    top_n: int | None,
) -> SamplingParams:
    says = (request.temperature, request.top_p, request.top_k, request.min_p, default_temperature)
    return SamplingParams(
        temperature=0.0 if all(value is None for value in says) else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=0.0 if request.frequency_penalty is None else request.frequency_penalty,
        presence_penalty=0.0 if request.presence_penalty is None else request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        max_len=request.max_tokens,
        stop=request.stop_seqs,
        ignore_eos=request.ignore_eos,
        logits_bias=request.logit_bias,
        n_choices=request.n_choices,
        top_n_logprobs=top_n,
        seed=seed,
        dry_params=dry_params(
            multiplier=request.dry_multiplier,
            base=request.dry_base,
            allowed_length=request.dry_allowed_length,
            sequence_breakers=request.dry_sequence_breakers,
        ),
    )


def _constraint(request: ChatCompletionRequest[Any] | CompletionRequest) -> Constraint | None:
    if request.grammar is None and request.grammar_type is None:
        return None
    if request.grammar is None or request.grammar_type is None:
        missing = "grammar" if request.grammar is None else "grammar_type"
        raise InvalidRequestError.of(missing, None, "both grammar and grammar_type, or none")
    return constraint_of(request.grammar_type, request.grammar, field="grammar_type")
