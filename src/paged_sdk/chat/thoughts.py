"""Know the marks that models put around what they think before they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from paged_sdk.chat.answer_pieces import AnswerPieces
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["ThoughtLimit", "ThoughtMarks"]


@frozen
class ThoughtMarks:
    """Holds a pair of marks.

    :ivar label: follows the opening mark
    """

    opening: str
    closing: str
    label: str = ""

    @classmethod
    def of_template(cls, source: str) -> ThoughtMarks | None:
        """Return the marks that a chat template knows: models whose templates name none do not think."""
        return next((marks for marks in _KNOWN if marks.closing in source), None)

    def are_open_after(self, prompt_end: str) -> bool:
        """Tell whether a prompt that ends with this text leaves the model thinking: some templates open the thought."""
        return prompt_end.rstrip().endswith(self.opening + self.label)

    def read(self, reader: TextReader, pieces: AnswerPieces, *, is_open: bool) -> Steps[None]:
        """Read the thought that an answer begins with, if it does.

        :param is_open: the prompt has begun it
        """
        place = reader.place
        space = yield from reader.space()
        # A model that repeats the opening mark after the prompt's own thinks once.
        if not (yield from reader.literal(self.opening + self.label)) and not is_open:
            pieces.content(space, place)
            return
        if (yield from reader.pass_until((self.closing,), pieces.reasoning)) is not None:
            pieces.end_reasoning()


@frozen(eq=False)
class ThoughtLimit:
    """Says when the thoughts of a text are to end.

    :ivar num_tokens: tokens of the text after which they end
    :ivar closing_ids: what ends them
    :ivar is_open: whether the prompt has begun them
    :ivar data_of: returns the bytes of tokens, special ones included
    """

    marks: ThoughtMarks
    num_tokens: int
    closing_ids: tuple[int, ...]
    is_open: bool
    data_of: Callable[[Sequence[int]], bytes]

    def cuts(self, token_ids: Sequence[int]) -> bool:
        """Tell whether a text that begins with these tokens, as many as the limit has, is thinking then."""
        text = self.data_of(token_ids).decode("utf-8", "replace")
        has_begun = self.is_open or text.lstrip().startswith(self.marks.opening)
        return has_begun and self.marks.closing not in text


_KNOWN: Final = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("<|channel>", "<channel|>", "thought"),
)
"""Qwen3, DeepSeek-R1 and many others; Magistral; Seed-OSS; Command A Reasoning; Gemma 4."""
