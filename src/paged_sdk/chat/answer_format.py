"""Define the formats in which models write answers, and find the format of a model by its chat template."""

from __future__ import annotations

import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

from attrs import evolve

import paged_sdk.chat.formats
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import MOST_CALLS, CallForm, GrammarWriter
from paged_sdk.chat.json_stream import JsonCallsWatch, JsonStream
from paged_sdk.chat.text_reader import Steps, TextReader, json_of
from paged_sdk.types.messages import Message

__all__ = [
    "AnswerFormat",
    "CallsOrContent",
    "MarkedCalls",
    "ToolSchemas",
    "beginner",
    "find_formats",
    "format_of",
    "json_call",
    "json_calls",
    "json_form",
    "named_json_form",
    "read_json_call",
    "read_json_calls",
]

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Maps the name of each tool that may be called to the JSON schema of its arguments."""


class AnswerFormat(ABC):
    """Reads answers in the format of one family of models. Malformed text is content."""

    shapes_all: bool = False
    """Whether all answers have this format, also without tools, so that it also handles the reasoning."""
    arguments_are_text: bool = False
    """Whether templates take the arguments of earlier calls as JSON text, instead of objects."""
    turn_ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end an answer, instead of the usual end-of-turn tokens; empty: the usual ones."""

    @abstractmethod
    def is_written_by(self, template: str) -> bool:
        """Tell whether a chat template, given as source, writes calls in this format. At most one format may return
        True for a template.
        """

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Return the special tokens that the format reads, which must appear in the text of answers."""

    def as_written_by(self, template: str) -> AnswerFormat:
        """Return the variant of the format that a template uses, given that :meth:`is_written_by` is True for it."""
        return self

    def chat_as_template_takes(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with their calls in the form that the template takes."""
        return [self.as_template_takes(message) for message in messages]

    def as_template_takes(self, message: Message) -> Message:
        """Return a message with its calls' arguments in the form that the template takes."""
        calls = [evolve(call, arguments=self._arguments(call.arguments)) for call in message.tool_calls]
        return evolve(message, tool_calls=calls) if calls else message

    def _arguments(self, arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
        if isinstance(arguments, str) and not self.arguments_are_text:
            with suppress(ValueError):
                value = json_of(arguments)
                return value if isinstance(value, dict) else arguments
        if not isinstance(arguments, str) and self.arguments_are_text:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments

    @abstractmethod
    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        """Return the form in which the format's models were trained to write calls, restricted to these tools and their
        schemas. :meth:`read` reads it back as calls of these tools with valid arguments.

        :raises ConstraintError: the format cannot express what a schema says
        """

    @property
    @abstractmethod
    def exact(self) -> AnswerFormat:
        """Return the variant of the format that reads only the form of :meth:`call_form` as calls, not the other
        spellings that models use.
        """

    @abstractmethod
    def mixed(self, writer: GrammarWriter, tools: ToolSchemas, opening: str | None) -> str:
        """Return the grammar expression of answers, after their reasoning, in which everything that :attr:`exact` reads
        as a call has the form of :meth:`call_form`.

        :param opening: text that the answers must not begin with, if any
        :raises ConstraintError: the format cannot express what a schema says
        """

    @property
    @abstractmethod
    def either(self) -> AnswerFormat:
        """Return the variant of the format that reads an answer as calls in the form of :meth:`call_form`, or else all
        of it as content.
        """

    @abstractmethod
    def calls_or(self, writer: GrammarWriter, tools: ToolSchemas, answer: str) -> str:
        """Return the grammar expression of answers, after their reasoning, that are calls, or else another expression.
        The variant :attr:`either` reads them.

        :param answer: the other expression, which begins with no mark
        :raises ConstraintError: the format cannot express what a schema says
        """

    @abstractmethod
    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        """Read an answer after its reasoning.

        :param tools: the tools that may be called; calls of others are content
        """


class MarkedCalls(AnswerFormat):
    """Reads answers in which calls begin with a mark, amid other text."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Return the texts that begin calls, but only at the beginning of the content."""
        return ()

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Return the texts that begin calls anywhere."""
        return ()

    @property
    def fillers(self) -> tuple[str, ...]:
        """Return the texts around calls that are dropped."""
        return ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call_marks, *self.fillers)

    @property
    def own_mark(self) -> str:
        """Return the one of :attr:`call_marks` and :attr:`openings` that calls of :meth:`call_form` begin with."""
        return self.call_marks[0]

    @property
    def exact(self) -> AnswerFormat:
        return _ExactCalls(self)

    @property
    def either(self) -> AnswerFormat:
        return CallsOrContent(self)

    def calls_or(self, writer: GrammarWriter, tools: ToolSchemas, answer: str) -> str:
        return writer.any_of((writer.rule(writer.calls(self.call_form(writer, tools), most=MOST_CALLS)), answer))

    def mixed(self, writer: GrammarWriter, tools: ToolSchemas, opening: str | None) -> str:
        form = self.call_form(writer, tools)
        beginnings = () if opening is None else (opening,)
        if self.own_mark in self.openings:
            text = writer.text_without((), beginnings=(self.own_mark, *beginnings))
            return f"({writer.calls(form, most=MOST_CALLS)} | {text} | {writer.pattern('/[ ]*/')})"
        mark = next(mark for mark in (*self.fillers, *self.call_marks) if form.opening.startswith(mark))
        before = writer.until(mark, words=(self.own_mark,), beginnings=beginnings)
        text = writer.text_without((mark, self.own_mark), beginnings=beginnings)
        return f"({before} {writer.calls(form, most=MOST_CALLS, without=mark)})* {text}?"

    @abstractmethod
    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        """Read calls after their mark or opening.

        :param mark: the mark or opening, which has been read
        :param pieces: may get arguments while they arrive
        :returns: the calls; None: there is none, and what has been read is content
        """

    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        while True:
            mark = None
            if self.openings and not pieces.has_content:
                reader.forget()
                position = reader.position
                pieces.content((yield from reader.space()), position)
                mark = yield from reader.one_of(self.openings)
            marks = (*self.call_marks, *self.fillers)
            if mark is None and not marks:
                yield from reader.pass_all(pieces.content)
            elif mark is None:
                mark = yield from reader.pass_until(marks, pieces.content)
            if mark is None:
                return
            if mark in self.fillers:
                continue
            start = reader.at - len(mark)
            calls = yield from self.calls(mark, reader, pieces, tools)
            if calls is None:
                pieces.drop_calls()
                pieces.content(reader.text[start : reader.at], reader.start + start)
            for call in calls or ():
                pieces.call(call)


def read_json_calls(reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[list[Call] | None]:
    """Read calls as :func:`json_calls` does, and stream their arguments to ``pieces``."""
    return json_calls((yield from reader.json_text(JsonCallsWatch(beginner(pieces, tools)))), tools)


def beginner(pieces: AnswerPieces, tools: ToolSchemas) -> Callable[[str], Callable[[str], None] | None]:
    """Return a function that begins the call of a tool, by name, and returns a function that appends to its arguments;
    or None for an unknown tool.
    """
    return lambda name: pieces.begin_call(name) if name in tools else None


def read_json_call(name: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[list[Call] | None]:
    """Read the arguments of a tool as :func:`json_call` does, and stream them to ``pieces``."""
    if name not in tools:
        return None
    watch: Callable[[str], object] | None = None

    def show(text: str) -> None:
        nonlocal watch
        if text and watch is None and text[0] == "{":
            watch = JsonStream(pieces.begin_call(name)).push
        if watch is not None:
            watch(text)

    return json_call(name, (yield from reader.json_text(show)), tools)


class _ExactCalls(MarkedCalls):
    """Reads answers whose calls all have the form of a format's :meth:`~AnswerFormat.call_form`.

    :param format: the format
    """

    def __init__(self, format: MarkedCalls) -> None:
        self._format = format
        self.shapes_all = format.shapes_all
        self.arguments_are_text = format.arguments_are_text

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.own_mark,) if self.own_mark in self._format.openings else ()

    @property
    def call_marks(self) -> tuple[str, ...]:
        return () if self.openings else (self.own_mark,)

    @property
    def fillers(self) -> tuple[str, ...]:
        return self._format.fillers

    @property
    def marks(self) -> tuple[str, ...]:
        return self._format.marks

    @property
    def own_mark(self) -> str:
        return self._format.own_mark

    def is_written_by(self, template: str) -> bool:
        return self._format.is_written_by(template)

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        return self._format.call_form(writer, tools)

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        return (yield from self._format.calls(mark, reader, pieces, tools))


class CallsOrContent(_ExactCalls):
    """Reads answers that are calls or, if they do not begin with the mark of one, content as a whole: marks within JSON
    are part of its strings.
    """

    @property
    def fillers(self) -> tuple[str, ...]:
        return () if self.openings else self._format.fillers

    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        position = reader.position
        space = yield from reader.space()
        mark = yield from reader.one_of((*self.fillers, self.own_mark))
        if mark is None:
            pieces.content(space, position)
            yield from reader.pass_all(pieces.content)
        else:
            reader.at -= len(mark)
            yield from super().read(reader, pieces, tools)


def json_calls(text: str | None, tools: ToolSchemas) -> list[Call] | None:
    """Return the calls that JSON text describes: an object with a name and arguments, or a list of such objects.

    Most model families use the keys "name" and "arguments"; Llama uses "parameters" for the arguments.

    :returns: the calls; None: the text is something else, or calls an unknown tool
    """
    try:
        value = json_of(text or "")
        found = list(_calls_of(value if isinstance(value, list) else [value], tools))
    except (ValueError, TypeError, KeyError):
        return None
    return found or None


def json_call(name: str, arguments: str | None, tools: ToolSchemas) -> list[Call] | None:
    """Return the call of a tool whose arguments are JSON text of an object.

    :returns: the call in a list; None: the arguments are not a JSON object, or the tool is unknown
    """
    try:
        value = json_of(arguments or "")
    except ValueError:
        return None
    return [Call.of(name, value)] if isinstance(value, dict) and name in tools else None


def _calls_of(values: list[Any], tools: ToolSchemas) -> Iterator[Call]:
    for value in values:
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, str):
            arguments = json_of(arguments)
        if not isinstance(arguments, dict) or value["name"] not in tools:
            raise ValueError("not a call")
        yield Call.of(value["name"], arguments)


def json_form(writer: GrammarWriter, tools: ToolSchemas, before: Callable[[str], str], after: str = "") -> str:
    """Return the grammar expression of a call whose arguments are JSON.

    :param before: maps the name of a tool to the text before its arguments
    :param after: the text after the arguments
    """
    calls = [
        f"{writer.text(before(name))} {writer.json({'additionalProperties': False, **schema}, f'the tool {name}')}"
        for name, schema in tools.items()
    ]
    return writer.rule(f"{writer.any_of(calls)} {writer.text(after)}")


def named_json_form(writer: GrammarWriter, tools: ToolSchemas) -> str:
    """Return the grammar expression of a call that is a JSON object with "name" and "arguments"."""
    return json_form(writer, tools, lambda name: f'{{"name": "{name}", "arguments": ', "}")


def find_formats() -> tuple[AnswerFormat, ...]:
    """Return every format: each module of :mod:`paged_sdk.chat.formats` holds one, as ``FORMAT``."""
    package = paged_sdk.chat.formats
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORMAT for name in names)


def format_of(template: str) -> AnswerFormat | None:
    """Return the format in which models with this chat template write calls, or None."""
    found = next((format for format in find_formats() if format.is_written_by(template)), None)
    return None if found is None else found.as_written_by(template)
