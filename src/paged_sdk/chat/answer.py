"""Take a model's answer apart while it is written: into what it thinks, what it says, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from paged_sdk.chat.answer_format import AnswerFormat, ToolSchemas, format_of
from paged_sdk.chat.answer_pieces import AnswerPiece, AnswerPieces
from paged_sdk.chat.grammar_writer import MOST_CALLS, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.chat.thoughts import ThoughtMarks
from paged_sdk.types.call_grammar import CallGrammar

__all__ = ["AnswerParser", "AnswerStyle"]


@frozen
class AnswerStyle:
    """Says how a model writes answers, as its chat template shows.

    :ivar thought: the marks around thoughts; None: it has none
    :ivar format: how it calls tools; None: in no way that is known
    """

    thought: ThoughtMarks | None = None
    format: AnswerFormat | None = None

    @classmethod
    def of_template(cls, source: str) -> AnswerStyle:
        """Find out from a template's source."""
        format = format_of(source)
        shapes_all = format is not None and format.shapes_all
        return cls(None if shapes_all else ThoughtMarks.of_template(source), format)

    def marks(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the texts of special tokens that the parser has to see."""
        thought = () if self.thought is None else (self.thought.opening, self.thought.closing)
        return (*thought, *(() if self.format is None or not self._reads(with_tools) else self.format.marks))

    def parser(self, tools: ToolSchemas | None) -> AnswerParser | None:
        """Return what takes one answer apart; None if there is nothing to look for.

        :param tools: the tools that may be called, if any
        """
        format = self.format if self._reads(tools is not None) else None
        return None if format is None and self.thought is None else AnswerParser(self.thought, format, tools or {})

    def forced_calls(
        self, tools: ToolSchemas, token_id: Callable[[str], int | None], prompt_end: str, *, several: bool
    ) -> CallGrammar:
        """Return the grammar of answers that are calls of these tools and nothing else.

        :param token_id: returns the token of a mark, if the vocabulary has one
        :param prompt_end: the end of the prompt's text. A thought that it has begun ends at once
        :param several: whether there may be more than one call, where the format can
        """
        assert self.format is not None, "the template calls no tools"
        writer = GrammarWriter(self.marks(with_tools=True), token_id)
        calls = writer.calls(self.format.call_form(writer, tools), most=MOST_CALLS if several else 1)
        if self.thought is not None and self.thought.are_open_after(prompt_end):
            line = "\n" if prompt_end.endswith("\n") else ""
            calls = f"{writer.text(f'{line}{self.thought.closing}{line}{line}')} {calls}"
        return writer.grammar(calls)

    @property
    def begun(self) -> AnswerStyle:
        """Return the style of what follows the beginning of a text: thoughts come before one."""
        return self if self.thought is None else evolve(self, thought=None)

    @property
    def exact(self) -> AnswerStyle:
        """Return the style of answers whose calls are held to a grammar: what else models write as calls is text."""
        return self if self.format is None else evolve(self, format=self.format.exact)

    def strict_calls(self, tools: ToolSchemas, token_id: Callable[[str], int | None], prompt_end: str) -> CallGrammar:
        """Return the grammar of answers in which all that :attr:`exact` reads as calls is one of these tools'.

        :param token_id: returns the token of a mark, if the vocabulary has one
        :param prompt_end: the end of the prompt's text, which may have begun a thought
        """
        assert self.format is not None, "the template calls no tools"
        writer = GrammarWriter(self.marks(with_tools=True), token_id)
        if self.thought is None:
            return writer.grammar(self.format.mixed(writer, tools, None))
        opening = self.thought.opening + self.thought.label
        ending = writer.until(self.thought.closing)
        if self.thought.are_open_after(prompt_end):
            return writer.grammar(f"{ending} {self.format.mixed(writer, tools, None)}")
        space = writer.pattern(r"/[ \n]{1,4}/")
        thought = f"{space}? {writer.text(opening)} {ending}"
        return writer.grammar(f"({thought})? {self.format.mixed(writer, tools, opening)}")

    def _reads(self, with_tools: bool) -> bool:
        return self.format is not None and (with_tools or self.format.shapes_all)


class AnswerParser:
    """Takes one answer apart, which arrives in pieces. Where they are cut makes no difference.

    Thoughts count where an answer begins with them. A call is given once it is whole; a text that is none is content,
    and so is a call of an unknown tool.

    :param thought: the marks around thoughts, if any
    :param format: how calls are written; None: there are no tools
    :param tools: those that may be called
    :ivar begins_in_thought: the prompt has begun a thought; to be set before the first piece
    """

    def __init__(self, thought: ThoughtMarks | None, format: AnswerFormat | None, tools: ToolSchemas) -> None:
        self.begins_in_thought: bool = False
        self._thought = thought
        self._format = format
        self._tools = tools
        self._reader = TextReader()
        self._pieces = AnswerPieces()
        self._steps = self._read()

    def note_prompt(self, end: str) -> None:
        """Say with what text the prompt ends, before the first piece."""
        self.begins_in_thought = self._thought is not None and self._thought.are_open_after(end)

    def push(self, text: str) -> list[AnswerPiece]:
        """Take in the next piece of text, and return what has become known, in order."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._pieces.take()

    def flush(self, text: str = "") -> list[AnswerPiece]:
        """Take in the last piece of text, and return what has become known with it and what was held back."""
        self._reader.feed(text)
        next(self._steps, None)
        self._reader.has_ended = True
        next(self._steps, None)
        self._pieces.end()
        return self._pieces.take()

    def _read(self) -> Steps[None]:
        if self._thought is not None:
            yield from self._thought.read(self._reader, self._pieces, is_open=self.begins_in_thought)
        if self._format is not None:
            yield from self._format.read(self._reader, self._pieces, self._tools)
        else:
            yield from self._reader.pass_all(self._pieces.content)
