"""Describes a model's vocabulary to llguidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    import llguidance

__all__ = ["Vocabulary"]

_BEFORE: Final = "\n"
"""A character that tokenizers do not merge with the text after it."""


@frozen(eq=False, kw_only=True)
class Vocabulary:
    """Holds what grammars need of a model's vocabulary.

    :ivar tokens: the bytes of each token, one per logit; a token without bytes is never allowed
    :ivar special_ids: tokens without text
    :ivar end_ids: tokens that end a text, at least one; they are also special
    :ivar encode: encodes text to token ids, without special tokens
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def for_grammars(self) -> llguidance.LLTokenizer:
        """Make llguidance's tokenizer: 0.1 s for 49,000 tokens."""
        import llguidance

        wrapped = llguidance.TokenizerWrapper(_Tokens(self))
        return llguidance.LLTokenizer(wrapped, n_vocab=len(self.tokens), eos_token=list(self.end_ids))


class _Tokens:
    """Implements the tokenizer interface that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode
        self._by_bytes: dict[bytes, int] = {}
        self._most = 0
        self._num_before = len(vocabulary.encode(_BEFORE))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance probes whether bytes can be encoded, too
            raise TypeError(text)
        # A tokenizer that prepends a space to a text (SentencePiece) does not insert one within the text.
        for token_ids in (self._encode(text), self._encode(_BEFORE + text)[self._num_before :]):
            if b"".join(self.tokens[token] for token in token_ids) == text.encode():
                return token_ids
        return self._longest(text.encode())  # the tokenizer changes the text

    def _longest(self, data: bytes) -> list[int]:
        """Encode bytes greedily by the longest matching token; bytes that no token matches are skipped."""
        if not self._by_bytes:
            special = set(self.special_token_ids)
            self._by_bytes = {each: token for token, each in enumerate(self.tokens) if each and token not in special}
            self._most = max(map(len, self._by_bytes), default=0)
        found, at = [], 0
        while at < len(data):
            for end in range(min(at + self._most, len(data)), at, -1):
                token = self._by_bytes.get(data[at:end])
                if token is not None:
                    found.append(token)
                    break
            at = end
        return found
