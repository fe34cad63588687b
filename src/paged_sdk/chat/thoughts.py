"""Define the marks that models put around their reasoning, which comes before the answer's content."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from paged_sdk.chat.answer_pieces import AnswerPieces
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["ThoughtLimit", "ThoughtMarks"]

_MOST_LATE: Final = 8
"""Most tokens by which reasoning may exceed its limit to end a character. Three bytes may be missing, but a token that
ends a character may begin another.
"""


@frozen
class ThoughtMarks:
    """Holds the marks around reasoning.

    :ivar label: text that follows the opening mark
    """

    opening: str
    closing: str
    label: str = ""

    @classmethod
    def of_template(cls, source: str) -> ThoughtMarks | None:
        """Return the marks that a chat template mentions; None if there are none, so that the model does not reason."""
        return next((marks for marks in _KNOWN if marks.closing in source), None)

    def are_open_after(self, prompt_end: str) -> bool:
        """Tell whether a prompt that ends with this text has opened the reasoning, as some templates do."""
        return prompt_end.rstrip().endswith(self.opening + self.label)

    def read(self, reader: TextReader, pieces: AnswerPieces, *, is_open: bool) -> Steps[None]:
        """Read the reasoning at the beginning of an answer, if there is any.

        :param is_open: whether the prompt has opened it
        """
        position = reader.position
        space = yield from reader.space()
        # If the prompt has opened the reasoning, a model that repeats the opening mark does not open it twice.
        if not (yield from reader.literal(self.opening + self.label)) and not is_open:
            pieces.content(space, position)
            return
        if (yield from reader.pass_until((self.closing,), pieces.reasoning)) is not None:
            pieces.end_reasoning()


@frozen(eq=False)
class ThoughtLimit:
    """Limits the number of tokens of an output's reasoning.

    :ivar marks: the marks around the reasoning
    :ivar num_tokens: output tokens after which the reasoning ends, or a few more: it ends with a whole character, since
        no grammar allows a mark within one
    :ivar closing_ids: the tokens of the closing mark
    :ivar is_open: whether the prompt has opened the reasoning
    :ivar data_of: returns the bytes of tokens, including special tokens
    """

    marks: ThoughtMarks
    num_tokens: int
    closing_ids: tuple[int, ...]
    is_open: bool
    data_of: Callable[[Sequence[int]], bytes]

    @property
    def most_tokens(self) -> int:
        """Return the largest number of output tokens up to the end of the closing mark."""
        return self.num_tokens + _MOST_LATE + len(self.closing_ids)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Return after how many of these output tokens the reasoning has to end; None: they are too few."""
        for length in range(self.num_tokens, len(token_ids) + 1):
            if length == self.num_tokens + _MOST_LATE or not _ends_within_character(self.data_of(token_ids[:length])):
                return length
        return None

    def cuts(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the reasoning is still open after the first :meth:`length` output tokens, which are given."""
        text = self.data_of(token_ids).decode("utf-8", "replace")
        has_begun = self.is_open or text.lstrip().startswith(self.marks.opening)
        return has_begun and self.marks.closing not in text


def _ends_within_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


_KNOWN: Final = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("<|channel>", "<channel|>", "thought"),
)
"""The marks of Qwen3, DeepSeek-R1 and many others; Magistral; Seed-OSS; Command A Reasoning; Gemma 4."""
