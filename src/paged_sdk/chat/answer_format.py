"""Define how models write their answers, and find the format of one by its chat template."""

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
"""The JSON schema of the arguments of each tool that may be called, by name."""


class AnswerFormat(ABC):
    """Reads answers as one family of models writes them. Text in which something is wrong is content."""

    shapes_all: bool = False
    """Whether answers have this form also where no tools are given, so that nothing else can read them."""
    arguments_are_text: bool = False
    """Whether templates take arguments of earlier calls as JSON text, rather than write objects out themselves."""
    turn_ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end an answer, in place of those that end turns in other formats."""

    @abstractmethod
    def is_written_by(self, template: str) -> bool:
        """Tell whether a chat template, given as its source, writes calls in this format. No two formats say so of
        the same template.
        """

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Return what has to be seen of special tokens, which have no text otherwise."""

    def as_written_by(self, template: str) -> AnswerFormat:
        """Return the variant of the format in which a template, which writes it, writes calls."""
        return self

    def chat_as_template_takes(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with their calls as templates take them."""
        return [self.as_template_takes(message) for message in messages]

    def as_template_takes(self, message: Message) -> Message:
        """Return a message whose calls have their arguments in the form that templates take."""
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
        """Return how calls of these tools are written, as the format's models were trained to: what is read of it are
        calls of these tools, with arguments that fit.

        :raises ConstraintError: the format has no form for what a schema says
        """

    @property
    @abstractmethod
    def exact(self) -> AnswerFormat:
        """Return what reads as calls only what :meth:`call_form` writes, where models may write them otherwise too."""

    @abstractmethod
    def mixed(self, writer: GrammarWriter, tools: ToolSchemas, opening: str | None) -> str:
        """Return the expression of answers, from where their thought ends, in which all that :attr:`exact` reads as
        calls is written as :meth:`call_form` says.

        :param opening: a text that they do not begin with
        :raises ConstraintError: as there
        """

    @abstractmethod
    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        """Read an answer from where its thought ends up to its end.

        :param tools: calls of anything else are content
        """


class MarkedCalls(AnswerFormat):
    """Reads answers that hold calls between marks, amid other text."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Return what begins calls where an answer's content begins, and nowhere else."""
        return ()

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Return what begins calls anywhere."""
        return ()

    @property
    def fillers(self) -> tuple[str, ...]:
        """Return what surrounds calls, and says nothing."""
        return ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call_marks, *self.fillers)

    @property
    def own_mark(self) -> str:
        """Return the mark or the opening with which the calls begin that :meth:`call_form` writes."""
        return self.call_marks[0]

    @property
    def exact(self) -> AnswerFormat:
        return _ExactCalls(self)

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
        """Read calls that follow a mark, or an opening, which has been taken.

        :param pieces: may be shown arguments as they arrive
        :returns: the calls; None: there is none, and what has been taken is text
        """

    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        while True:
            mark = None
            if self.openings and not pieces.has_content:
                reader.forget()
                place = reader.place
                pieces.content((yield from reader.space()), place)
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
    """Read calls as :func:`json_calls` does, and show them as they arrive."""
    return json_calls((yield from reader.json_text(JsonCallsWatch(beginner(pieces, tools)))), tools)


def beginner(pieces: AnswerPieces, tools: ToolSchemas) -> Callable[[str], Callable[[str], None] | None]:
    """Return what begins a call by its name and returns what takes its arguments; None: it is no tool's."""
    return lambda name: pieces.begin_call(name) if name in tools else None


def read_json_call(name: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[list[Call] | None]:
    """Read the arguments of a tool as :func:`json_call` does, and show them as they arrive."""
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
    """Reads answers whose calls are all written in a format's own form.

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


def json_calls(text: str | None, tools: ToolSchemas) -> list[Call] | None:
    """Return the calls that JSON text describes: an object with a name and arguments, or a list of them.

    Models of most families call these "name" and "arguments", Llama's the latter "parameters".

    :returns: None: it is none, or names what is not a tool
    """
    try:
        value = json_of(text or "")
        found = list(_calls_of(value if isinstance(value, list) else [value], tools))
    except (ValueError, TypeError, KeyError):
        return None
    return found or None


def json_call(name: str, arguments: str | None, tools: ToolSchemas) -> list[Call] | None:
    """Return the call of a tool with arguments given as JSON text of an object.

    :returns: None: they are none, or there is no such tool
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
    """Return the expression of a call whose arguments are JSON.

    :param before: returns what stands before the arguments of a tool, by its name
    :param after: stands behind them
    """
    calls = [
        f"{writer.text(before(name))} {writer.json({'additionalProperties': False, **schema}, f'the tool {name}')}"
        for name, schema in tools.items()
    ]
    return writer.rule(f"{writer.any_of(calls)} {writer.text(after)}")


def named_json_form(writer: GrammarWriter, tools: ToolSchemas) -> str:
    """Return the expression of a call that is a JSON object of a name and arguments."""
    return json_form(writer, tools, lambda name: f'{{"name": "{name}", "arguments": ', "}")


def find_formats() -> tuple[AnswerFormat, ...]:
    """Return every format: each module of :mod:`paged_sdk.chat.formats` holds one, as ``FORMAT``."""
    package = paged_sdk.chat.formats
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(import_module(f"{package.__name__}.{name}").FORMAT for name in names)


def format_of(template: str) -> AnswerFormat | None:
    """Return the format in which the models of a chat template write calls, or None."""
    found = next((format for format in find_formats() if format.is_written_by(template)), None)
    return None if found is None else found.as_written_by(template)
