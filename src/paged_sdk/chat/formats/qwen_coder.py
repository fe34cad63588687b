"""Read tool calls of Qwen3-Coder and Seed-OSS: one tag for the function, and one for each argument.

Values are written into their tags verbatim. The tool's schema decides whether a value is a string or JSON.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.tagged_values import TaggedArguments, tagged_form
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


@frozen
class _QwenCoder(MarkedCalls):
    """Reads the format of Qwen, or of Seed.

    :ivar tag: the tag around a call
    """

    tag: str = "tool_call"

    # The model sometimes omits the outer tag.
    call_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    fillers: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")

    def is_written_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    @property
    def own_mark(self) -> str:
        return "<tool_call>" if self.tag == "tool_call" else "<function="

    def as_written_by(self, template: str) -> AnswerFormat:
        return _QwenCoder(tag="seed:tool_call" if "<seed:tool_call>" in template else "tool_call")

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        return CallForm(
            opening=f"<{self.tag}>\n",
            call=tagged_form(
                writer,
                tools,
                begin_call=lambda name: f"<function={name}>\n",
                begin=lambda key: f"<parameter={key}>\n",
                end="\n</parameter>",
                after="\n",
                end_call="</function>",
            ),
            separator=f"\n</{self.tag}>\n<{self.tag}>\n",
            closing=f"\n</{self.tag}>",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        if mark == "<tool_call>":
            yield from reader.space()
            if not (yield from reader.literal("<function=")):
                return None
        name = yield from reader.until(">", "\n")
        if name is None or name[1] != ">" or name[0] not in tools:
            return None
        arguments = TaggedArguments(pieces.begin_call(name[0]), tools[name[0]])
        while True:
            yield from reader.space()
            tag = yield from reader.one_of(("</function>", "<parameter="))
            if tag is None:
                return None
            if tag == "</function>":
                break
            key = yield from reader.until(">", "\n")
            if key is None or key[1] != ">" or not (yield from arguments.read(key[0], reader, "</parameter>")):
                return None
        if mark == "<tool_call>":
            yield from reader.space()
            yield from reader.literal("</tool_call>")
        return [Call.of(name[0], arguments.values)]


FORMAT = _QwenCoder()
