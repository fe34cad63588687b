"""Parse a model's answer while it is generated, into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from paged_sdk.chat.answer_format import AnswerFormat, ToolSchemas, format_of
from paged_sdk.chat.answer_pieces import AnswerPiece, AnswerPieces
from paged_sdk.chat.grammar_writer import MOST_CALLS, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.chat.thoughts import ThoughtMarks
from paged_sdk.types.answer_form import AnswerForm
from paged_sdk.types.call_grammar import CallGrammar
from paged_sdk.types.constraint import Constraint

__all__ = ["AnswerParser", "AnswerStyle"]


@frozen
class AnswerStyle:
    """Describes how a model writes answers, as far as its chat template shows.

    :ivar thought: the marks around its reasoning; None: it does not reason
    :ivar format: its format of tool calls; None: no known format
    """

    thought: ThoughtMarks | None = None
    format: AnswerFormat | None = None

    @classmethod
    def of_template(cls, source: str) -> AnswerStyle:
        """Determine the style from a template's source."""
        format = format_of(source)
        shapes_all = format is not None and format.shapes_all
        return cls(None if shapes_all else ThoughtMarks.of_template(source), format)

    def marks(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the special tokens that the parser has to see in the text."""
        thought = () if self.thought is None else (self.thought.opening, self.thought.closing)
        return (*thought, *(() if self.format is None or not self._reads(with_tools) else self.format.marks))

    def parser(self, tools: ToolSchemas | None) -> AnswerParser | None:
        """Make a parser of one answer; None if all of the answer is content.

        :param tools: the tools that may be called; None: no tools
        """
        format = self.format if self._reads(tools is not None) else None
        return None if format is None and self.thought is None else AnswerParser(self.thought, format, tools or {})

    def forced_calls(
        self, tools: ToolSchemas, token_id: Callable[[str], int | None], prompt_end: str, *, several: bool
    ) -> CallGrammar:
        """Return the grammar of answers that are calls of these tools and nothing else.

        :param token_id: returns the token id of a mark, if the vocabulary has one
        :param prompt_end: the end of the prompt's text. If it opens the reasoning, the answer closes it at once
        :param several: whether to allow more than one call, if the format does
        """
        assert self.format is not None, "the template calls no tools"
        writer = GrammarWriter(self.marks(with_tools=True), token_id)
        calls = writer.calls(self.format.call_form(writer, tools), most=MOST_CALLS if several else 1)
        if self.thought is not None and self.thought.are_open_after(prompt_end):
            line = "\n" if prompt_end.endswith("\n") else ""
            calls = f"{writer.text(f'{line}{self.thought.closing}{line}{line}')} {calls}"
        return writer.grammar(calls)

    def of_form(self, form: AnswerForm) -> AnswerStyle:
        """Return the style of answers of this form, which parses what the form's grammar allows."""
        match form:
            case AnswerForm.STRICT_CALLS:
                return self.exact
            case AnswerForm.CALLS_OR_JSON:
                return self.either
        return self

    @property
    def begun(self) -> AnswerStyle:
        """Return the style of the rest of an answer whose beginning is given: it has no reasoning."""
        return self if self.thought is None else evolve(self, thought=None)

    @property
    def exact(self) -> AnswerStyle:
        """Return the style of answers whose calls a grammar constrains: other spellings of calls are content."""
        return self if self.format is None else evolve(self, format=self.format.exact)

    @property
    def either(self) -> AnswerStyle:
        """Return the style of answers that are calls or, as a whole, content."""
        return self if self.format is None else evolve(self, format=self.format.either)

    def calls_or_json(
        self,
        tools: ToolSchemas,
        schema: Constraint,
        token_id: Callable[[str], int | None],
        prompt_end: str,
    ) -> CallGrammar:
        """Return the grammar of answers that, after their reasoning, are calls of these tools or JSON of a schema.

        :param token_id: returns the token id of a mark, if the vocabulary has one
        :param prompt_end: the end of the prompt's text, which may open the reasoning
        """
        assert self.format is not None, "the template calls no tools"
        writer = GrammarWriter(self.marks(with_tools=True), token_id)
        answer = self.format.calls_or(writer, tools, writer.answer(schema.source, compact=schema.compact))
        if self.thought is None:
            return writer.grammar(answer)
        ending = writer.until(self.thought.closing)
        space = writer.pattern(r"/[ \n]{1,4}/")
        if self.thought.are_open_after(prompt_end):
            return writer.grammar(f"{ending} {space}? {answer}")
        opening = writer.text(self.thought.opening + self.thought.label)
        return writer.grammar(f"({space}? {opening} {ending} {space}?)? {answer}")

    def strict_calls(self, tools: ToolSchemas, token_id: Callable[[str], int | None], prompt_end: str) -> CallGrammar:
        """Return the grammar of answers that may contain calls of these tools, and nothing else that :attr:`exact`
        would read as a call.

        :param token_id: returns the token id of a mark, if the vocabulary has one
        :param prompt_end: the end of the prompt's text, which may open the reasoning
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
    """Parses one answer, which arrives in pieces. The result does not depend on where the pieces are cut.

    Reasoning is recognized only at the beginning of an answer. A call is returned once it is complete; malformed calls
    and calls of unknown tools are content.

    :param thought: the marks around reasoning, if any
    :param format: the format of tool calls; None: there are no tools
    :param tools: the tools that may be called
    :ivar begins_in_thought: whether the prompt has opened the reasoning; to be set before the first piece
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
        """Set :attr:`begins_in_thought` from the end of the prompt's text, before the first piece."""
        self.begins_in_thought = self._thought is not None and self._thought.are_open_after(end)

    def push(self, text: str) -> list[AnswerPiece]:
        """Parse the next piece of text, and return what is known since the last call, in order."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._pieces.take()

    def flush(self, text: str = "") -> list[AnswerPiece]:
        """Parse the last piece of text, and return the rest, including text that was held back."""
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
