"""Turn requests into token ids, and hold what the engine needs to know about a model's text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import field, frozen

from paged_sdk.chat.answer import AnswerStyle
from paged_sdk.chat.answer_format import format_of
from paged_sdk.chat.content_guard import Change
from paged_sdk.chat.generation_config import read_generation_defaults
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.rerank_template import chat_template_of
from paged_sdk.chat.template import ChatTemplate, choose_template, read_template
from paged_sdk.chat.thoughts import ThoughtLimit
from paged_sdk.chat.tiktoken_file import TIKTOKEN_CLASSES, backend_from_tiktoken, with_reserved_tokens
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.chat.tokenizer_config import TokenizerConfig
from paged_sdk.config.checks import plain
from paged_sdk.config.ranking import PairForm
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.errors import CheckpointError, InvalidRequestError, shown
from paged_sdk.system.files import is_file, read_text
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.types.call_grammar import CallGrammar
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.messages import Message, TextMessageRole
from paged_sdk.types.request_options import RequestOptions
from paged_sdk.types.tool import Tool

__all__ = ["TextProcessor", "load_text_processor", "text_processor_from_gguf"]

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""End-of-turn tokens of templates in use. Some checkpoints declare only the token that ends a document as eos."""

_PROMPT_END = 32
"""More tokens than a mark that opens reasoning and the line breaks after it, even if each token has one byte."""


@frozen(kw_only=True)
class TextProcessor:
    """Turns conversations and texts into token ids for one model, and holds what is needed to read its outputs.

    :ivar tokenizer: converts text to tokens and back
    :ivar template: renders conversations; None: the model has no chat template
    :ivar pair_template: renders a query and a document, if the model has a separate template for them; None: the chat
        template renders them, if it can
    :ivar defaults: sampling parameters for requests that do not set them
    :ivar stop_token_ids: tokens that end an output
    :ivar model_max_length: context length according to the tokenizer's files, or None
    :ivar answers: how the model writes answers
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    pair_template: ChatTemplate | None = None
    defaults: GenerationDefaults
    stop_token_ids: frozenset[int]
    model_max_length: int | None = None
    answers: AnswerStyle = field(init=False)

    @answers.default
    def _answers(self) -> AnswerStyle:
        return AnswerStyle() if self.template is None else AnswerStyle.of_template(self.template.source)

    def kept_special_ids(self, answers: AnswerStyle, *, with_tools: bool) -> frozenset[int]:
        """Return the special tokens that must appear in the text of an answer, for its parser.

        :param answers: the style of the answer
        :param with_tools: whether the answer may call tools
        """
        ids = map(self.tokenizer.token_id, answers.marks(with_tools=with_tools))
        return frozenset(id for id in ids if id is not None and self.tokenizer.is_special(id))

    def thought_limit(self, num_tokens: int, prompt_token_ids: Sequence[int]) -> ThoughtLimit | None:
        """Return a limit of ``num_tokens`` for the reasoning of an output; None if the model does not reason."""
        marks = self.answers.thought
        if marks is None:
            return None
        tokenizer = self.tokenizer
        return ThoughtLimit(
            marks,
            num_tokens,
            tuple(tokenizer.encode(marks.closing, add_special_tokens=False)),
            marks.are_open_after(self.prompt_end(prompt_token_ids)),
            partial(tokenizer.decode_bytes, skip_special_tokens=False),
        )

    def language(self, options: RequestOptions, prompt_token_ids: Sequence[int]) -> Constraint | CallGrammar | None:
        """Return what the output of a request is constrained to: the grammar of its answer form, or its own constraint;
        None: nothing.

        :raises ConstraintError: the model's format of calls cannot express what a tool's schema says
        """
        form, answers, token_id = options.answer_form, self.answers, self.tokenizer.token_id
        if form in (AnswerForm.FREE, AnswerForm.CONSTRAINED):
            return options.constraint
        end = self.prompt_end(prompt_token_ids)
        tools = {tool.name: tool.parameters for tool in options.forced_tools or options.shown_tools}
        if form is AnswerForm.CALLS:
            return answers.forced_calls(tools, token_id, end, several=options.tool_choice == "required")
        if form is AnswerForm.STRICT_CALLS:
            return answers.strict_calls(tools, token_id, end)
        assert options.constraint is not None, "the JSON has a schema"
        return answers.calls_or_json(tools, options.constraint, token_id, end)

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, special tokens included."""
        return self.tokenizer.decode(token_ids[-_PROMPT_END:], skip_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Tool] = (),
        special_tokens_in_content: bool = False,
        interruption: Interruption | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, as a prompt.

        They encode exactly the rendered text: no bos token is added, since templates write it themselves.

        :param continue_final_message: whether the model continues the last message, which is its own
        :param enable_thinking: passed to the template; None leaves the template's default
        :param reasoning_effort: passed to the template; None leaves the template's default
        :param tools: the tools that the model may call
        :param special_tokens_in_content: whether special tokens that are spelled out in messages are encoded as
            special tokens; otherwise they are text
        :param interruption: lets another thread end the rendering
        :raises InvalidRequestError: the model has no chat template, or its template refuses the conversation
        """
        template = self._chat_template
        if tools:
            self._check_tools(template)
        if self.answers.format is not None:
            messages = self.answers.format.chat_as_template_takes(messages)

        def render(change: Change | None) -> str:
            return template.render(
                messages,
                continue_final_message=continue_final_message,
                enable_thinking=enable_thinking,
                reasoning_effort=reasoning_effort,
                tools=tools,
                change=change,
                interruption=interruption,
            )

        return self._encoded(render, messages, template, tools, special_tokens_in_content=special_tokens_in_content)

    def encode_roles(
        self, form: PairForm, parts: Mapping[str, str], interruption: Interruption | None = None
    ) -> list[int]:
        """Render texts with custom roles, such as query and document, and return the token ids.

        :param form: how to call the template
        :param parts: maps roles to texts; special tokens that are spelled out in a text are encoded as text
        :param interruption: as for :meth:`encode_chat`
        :raises InvalidRequestError: as for :meth:`encode_chat`
        """
        template = self.pair_template or self._chat_template
        messages = [Message(TextMessageRole.USER, text) for text in parts.values()]

        def render(change: Change | None) -> str:
            return template.render(
                messages,
                add_generation_prompt=form.add_generation_prompt,
                roles=list(parts),
                variables=form.variables,
                change=change,
                interruption=interruption,
            )

        return self._encoded(render, messages, template)

    @property
    def _chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequestError(
                "this model has no chat template",
                field="messages",
                advice="give one with with_chat_template, or send plain text with send_completion_request",
            )
        return self.template

    def _encoded(
        self,
        render: Callable[[Change | None], str],
        messages: Sequence[Message],
        template: ChatTemplate,
        tools: Sequence[Tool] = (),
        *,
        special_tokens_in_content: bool = False,
    ) -> list[int]:
        """Return the token ids of rendered messages.

        :param render: renders the messages with the template, after applying a change to each
        :param template: the template
        """
        guard = self.tokenizer.content_guard
        if special_tokens_in_content or not guard.is_needed(messages, tools):
            ids = self.tokenizer.encode(render(None), add_special_tokens=False)
        else:
            ids = guard.encode(render, messages, tools, source=template.source)
        return self._not_empty(ids, "messages")

    def encode_prompt(self, text: str, field: str = "prompt") -> list[int]:
        """Return the token ids of a plain-text prompt, with the model's own special tokens added.

        :param field: name of the text in errors
        :raises InvalidRequestError: the prompt has no tokens
        """
        return self._not_empty(self.tokenizer.encode(text, add_special_tokens=True), field)

    def _check_tools(self, template: ChatTemplate) -> None:
        """Check that the template takes tools, and that the format of its calls is known.

        :raises InvalidRequestError: one of these is not the case
        """
        if not template.takes_tools:
            raise InvalidRequestError(
                "the model's chat template takes no tools",
                field="tools",
                advice="give one that does with with_chat_template",
            )
        if self.answers.format is None:
            raise InvalidRequestError(
                "the model's chat template writes calls of tools in a format that is not known here", field="tools"
            )

    def close(self) -> None:
        """End the template's rendering processes, if any."""
        for template in (self.template, self.pair_template):
            if template is not None:
                template.close()

    def _not_empty(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise InvalidRequestError(f"{field} has no tokens", field=field, allowed="a text of at least one token")
        return ids


def load_text_processor(
    directory: str | Path, *, chat_template: str | Path | None = None, tokenizer_json: str | Path | None = None
) -> TextProcessor:
    """Load tokenizer and chat template of a Hugging Face checkpoint.

    The template is the first of: the argument ``chat_template``, chat_template.jinja, ``chat_template`` of
    tokenizer_config.json.

    :param chat_template: a template, or the path of a file with one
    :param tokenizer_json: a tokenizer to use instead of the checkpoint's own
    :raises CheckpointError: a file is missing or malformed
    """
    directory = Path(directory)
    config = TokenizerConfig.read(directory)
    path = directory / "tokenizer.json" if tokenizer_json is None else Path(tokenizer_json)
    if tokenizer_json is None and not is_file(path):
        tokenizer = _older_tokenizer(directory, config)
    else:
        tokenizer = Tokenizer.from_file(path, config)
    source = _stored_template(directory, config) if chat_template is None else read_template(chat_template)
    defaults = read_generation_defaults(directory)
    return _text_processor(tokenizer, source, defaults, defaults.eos_token_ids, config.model_max_length)


def _older_tokenizer(directory: Path, config: TokenizerConfig) -> Tokenizer:
    """Make the tokenizer of a checkpoint without tokenizer.json.

    :raises CheckpointError: it has no tiktoken.model either, or one of an unknown class
    """
    path, known = directory / "tiktoken.model", TIKTOKEN_CLASSES.get(config.tokenizer_class or "")
    if not is_file(path):
        raise CheckpointError(
            f"{directory} has no tokenizer.json. transformers writes one from the older files (tokenizer.model, "
            "vocab.json and merges.txt): AutoTokenizer.from_pretrained(directory).save_pretrained(directory)",
            path=directory / "tokenizer.json",
        )
    if known is None:
        raise CheckpointError(
            f"{directory} has no tokenizer.json, and the pattern by which its {path.name} splits text is in Python "
            f"code that is not run: tokenizer_class = {shown(config.tokenizer_class)}, and known is "
            f"{', '.join(TIKTOKEN_CLASSES)}. Give the model's tokenizer.json with with_tokenizer_json",
            path=path,
        )
    backend = backend_from_tiktoken(path, known)
    return Tokenizer.from_backend(backend, path, with_reserved_tokens(config, backend.get_vocab_size()))


def _stored_template(directory: Path, config: TokenizerConfig) -> str | None:
    """Return the chat template in a checkpoint's directory, or None."""
    if is_file(directory / "chat_template.jinja"):
        return read_text(directory / "chat_template.jinja")
    return choose_template(config.chat_template, where=str(config.path))


def text_processor_from_gguf(
    metadata: Mapping[str, Any], *, chat_template: str | Path | None = None, tokenizer_json: str | Path | None = None
) -> TextProcessor:
    """Build tokenizer and chat template from the metadata of a GGUF file.

    :param metadata: the file's metadata; arrays are lists or numpy arrays
    :param chat_template: a template, or the path of a file with one, to use instead of the file's own
    :param tokenizer_json: a tokenizer to use instead of the file's own, with its tokenizer_config.json beside it. If
        the GGUF file has no chat template, the one in that directory is used
    :raises CheckpointError: the metadata or a file is malformed
    """
    source = None if chat_template is None else read_template(chat_template)
    if chat_template is None:
        source = choose_template(metadata.get("tokenizer.chat_template"), where="tokenizer.chat_template")
    if tokenizer_json is not None:
        path = Path(tokenizer_json)
        config = TokenizerConfig.read(path.parent)
        tokenizer = Tokenizer.from_file(path, config)
        source = _stored_template(path.parent, config) if source is None else source
    else:
        tokenizer = tokenizer_from_gguf(metadata)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [id for key in keys if (id := _whole(metadata, f"tokenizer.ggml.{key}")) is not None]
    context = _whole(metadata, f"{metadata.get('general.architecture')}.context_length")
    rerank = metadata.get("tokenizer.chat_template.rerank")
    if rerank is not None and not isinstance(rerank, str):
        raise CheckpointError(f"tokenizer.chat_template.rerank = {shown(rerank)}: expected a text")
    return _text_processor(tokenizer, source, GenerationDefaults(), ends, context, rerank)


def _whole(metadata: Mapping[str, Any], key: str) -> int | None:
    """Return an int of the metadata, or None if the key is missing."""
    value = plain(metadata.get(key))
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise CheckpointError(f"{key} = {shown(value)}: expected a 32-bit int >= 0")
    return value


def _text_processor(
    tokenizer: Tokenizer,
    source: str | None,
    defaults: GenerationDefaults,
    ends: Iterable[int],
    model_max_length: int | None,
    rerank: str | None = None,
) -> TextProcessor:
    template = None if source is None else ChatTemplate(source, tokenizer.special.names)
    pair_template = None
    if rerank is not None and not (template is not None and template.names_pairs):
        pair_template = ChatTemplate(chat_template_of(rerank), tokenizer.special.names)
    format = None if source is None else format_of(source)
    own_ends = () if format is None else format.turn_ends
    texts = own_ends or [text for text in _END_OF_TURN if template is not None and template.mentions(text)]
    turns = map(tokenizer.token_id, texts)
    stops = {*ends, tokenizer.special.eos, *(id for id in turns if id is not None and tokenizer.is_special(id))}
    if own_ends:
        stops -= {tokenizer.token_id(text) for text in _END_OF_TURN}
    return TextProcessor(
        tokenizer=tokenizer,
        template=template,
        pair_template=pair_template,
        defaults=defaults,
        stop_token_ids=frozenset(id for id in stops if id is not None),
        model_max_length=model_max_length,
    )
