"""Read answers of gpt-oss (OpenAI's Harmony format): messages on channels for reasoning, calls and content."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from attrs import evolve, frozen

from paged_sdk.chat.answer_format import AnswerFormat, ToolSchemas, json_form, read_json_call
from paged_sdk.chat.answer_pieces import AnswerPieces
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_TO: Final = "to="
_RECIPIENT: Final = re.compile(rf"\b{_TO}functions\.([\w.-]+)")


@frozen
class _Harmony(AnswerFormat):
    """Reads messages.

    :ivar ends_with_final: whether all that follows the first mark of a final message is its text, marks included
    """

    ends_with_final: bool = False

    shapes_all = True
    # <|end|> only ends a message of reasoning; a call or the content follows.
    turn_ends: ClassVar[tuple[str, ...]] = ("<|return|>", "<|call|>")

    @property
    def marks(self) -> tuple[str, ...]:
        return (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)

    def is_written_by(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        # No closing: <|call|>, which ends the call, ends the answer.
        return CallForm(
            opening="<|channel|>commentary to=functions.",
            call=json_form(writer, tools, lambda name: f"{name} <|constrain|>json<|message|>"),
        )

    @property
    def exact(self) -> AnswerFormat:
        return self

    def mixed(self, writer: GrammarWriter, tools: ToolSchemas, opening: str | None) -> str:
        text = writer.text_without(self.marks)
        said = [f"{writer.text(f'{_CHANNEL}{name}{_MESSAGE}')} {text}?" for name in ("analysis", "commentary", "final")]
        message = writer.rule(writer.any_of(said))
        call = writer.calls(self.call_form(writer, tools), most=1)
        return f"({message} {writer.text(f'<|end|>{_START}assistant')})* {writer.any_of((message, call))}"

    @property
    def either(self) -> AnswerFormat:
        return evolve(self, ends_with_final=True)

    def calls_or(self, writer: GrammarWriter, tools: ToolSchemas, answer: str) -> str:
        text = writer.text_without(self.marks)
        thought = writer.rule(f"{writer.text(f'{_CHANNEL}analysis{_MESSAGE}')} {text}?")
        call = writer.calls(self.call_form(writer, tools), most=1)
        final = f"{writer.text(f'{_CHANNEL}final <|constrain|>json{_MESSAGE}')} {answer}"
        return f"({thought} {writer.text(f'<|end|>{_START}assistant')})* {writer.any_of((call, final))}"

    def read(self, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[None]:
        # The prompt ends within the header of a message, so the answer may begin with the recipient, before any mark.
        position = reader.position
        space = yield from reader.space()
        mark: str | None = _START
        if (yield from reader.literal(_TO)):
            reader.at -= len(space + _TO)
        else:
            pieces.content(space, position)
            mark = ""
        while mark is not None:
            # Other text between messages is content.
            while mark not in (_START, _CHANNEL, None):
                mark = yield from reader.pass_until((_START, _CHANNEL, _MESSAGE, *_ENDS), pieces.content)
            if mark is not None:
                start = reader.at
                header = yield from reader.until(_MESSAGE)
                if header is None:
                    pieces.content(reader.text[start:], reader.start + start)
                    return
                if self.ends_with_final and re.search(r"\bfinal\b", header[0]):
                    yield from reader.pass_all(pieces.content)
                    return
                mark = yield from _message(header[0], reader, pieces, tools)


def _message(header: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[str | None]:
    """Read a message after its header, and return the mark that ends it; None if the answer ends without one."""
    ends = (*_ENDS, _START, _CHANNEL)
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        start = reader.at
        yield from reader.space()
        calls = yield from read_json_call(recipient[1], reader, pieces, tools)
        called = reader.at
        rest = yield from reader.until(*ends)
        if rest is None:
            reader.at = len(reader.text)
        end = reader.at - (0 if rest is None else len(rest[1]))
        if calls is None or reader.text[called:end].strip():
            pieces.drop_calls()
            pieces.content(reader.text[start:end], reader.start + start)
            calls = None
        for call in calls or ():
            pieces.call(call)
        return None if rest is None else rest[1]
    if re.search(r"\banalysis\b", header):
        pieces.reasoning("\n", None)
        return (yield from reader.pass_until(ends, pieces.reasoning))
    if pieces.has_content:
        pieces.content("\n", None)
    return (yield from reader.pass_until(ends, pieces.content))


FORMAT = _Harmony()
