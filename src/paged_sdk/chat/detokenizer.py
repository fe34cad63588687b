"""Detokenize an output incrementally, while it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from paged_sdk.chat.output_bytes import OutputBytes
from paged_sdk.chat.token_spans import TokenSpans
from paged_sdk.chat.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns the tokens of one output into text, piece by piece.

    Characters are returned as soon as they are complete; bytes of an incomplete character are held back. The pieces and
    the flush, joined, equal ``tokenizer.decode`` of all tokens. Time is linear in the output.

    :param continues_prompt: whether the output continues a plain-text prompt. With a SentencePiece vocabulary, the
        leading space is then kept, which decoding a separate text would strip
    :param kept: special tokens whose text is not skipped
    """

    __slots__ = ("_output",)

    def __init__(
        self, tokenizer: Tokenizer, *, continues_prompt: bool = False, kept: frozenset[int] = frozenset()
    ) -> None:
        strips_space = tokenizer.strips_leading_space and not continues_prompt
        self._output = OutputBytes(tokenizer, kept=kept, strips_space=strips_space)

    def leave_out(self, num_bytes: int) -> None:
        """Drop the first bytes of the output. Call this before the first token."""
        self._output.leave_out(num_bytes)

    def token_spans(self) -> TokenSpans:
        """Return an object that maps tokens to characters of the text. Call this before the first token."""
        return TokenSpans(self._output.copy())

    def append(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. Special tokens are skipped unless they are ``kept``."""
        return self._output.text_of(self._output.bytes_of(ids))

    def flush(self) -> str:
        """Return the rest of the output: U+FFFD if it ended within a character, otherwise nothing."""
        return self._output.text_of(b"", is_last=True)
