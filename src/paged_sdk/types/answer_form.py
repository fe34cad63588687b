"""Name what the answer to a request may be."""

from __future__ import annotations

from enum import Enum

__all__ = ["AnswerForm"]


class AnswerForm(Enum):
    """Names what an answer may be: a request's tools, its tool choice and its constraint decide that together.

    The form decides the grammar of the output (:meth:`TextProcessor.language`), how the answer is parsed
    (:meth:`AnswerStyle.of_form`), and whether it may begin with reasoning.
    """

    FREE = "free"
    """Any text. Calls of tools, if there are any, are read in all spellings that the model's format knows."""
    STRICT_CALLS = "strict_calls"
    """Any text, in which calls have the one form of the model's format, with arguments of their tools' schemas."""
    CALLS = "calls"
    """Calls of tools, and nothing else."""
    CALLS_OR_JSON = "calls_or_json"
    """Either calls of tools, or JSON of the constraint's schema."""
    CONSTRAINED = "constrained"
    """Text of the constraint. It is content, whatever it looks like: not parsed for reasoning and calls."""

    @property
    def is_prose(self) -> bool:
        """Return whether the answer as a whole is text for people, rather than for a parser."""
        return self in (AnswerForm.FREE, AnswerForm.STRICT_CALLS)

    @property
    def may_reason(self) -> bool:
        """Return whether the answer may begin with reasoning."""
        return self not in (AnswerForm.CALLS, AnswerForm.CONSTRAINED)
