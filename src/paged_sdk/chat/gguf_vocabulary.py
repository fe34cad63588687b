"""Read and check the vocabulary in the metadata of a GGUF file (keys ``tokenizer.ggml.*``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, TypeVar

import tokenizers
from attrs import frozen

from paged_sdk.errors import CheckpointError, shown

__all__ = ["MAX_TOKEN", "SPECIAL_IDS", "BuiltTokenizer", "GgufVocabulary", "TokenType", "array"]

# Loading looks up every split of every token in two, so its time depends on their total length: 16 million characters
# take 8 s. The largest vocabulary in use, Gemma 3's, has 1.9 million, and tokens of up to 48.
MAX_TOKEN: Final = 1 << 12
_MAX_TOKENS: Final = 1 << 24

SPECIAL_IDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
)
"""Maps names of special tokens in tokenizer_config.json to GGUF's keys of their ids, without the prefix."""


class TokenType(IntEnum):
    """Lists the types of tokens, numbered as in GGUF's ``token_type`` and in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen(kw_only=True)
class GgufVocabulary:
    """Holds the checked vocabulary of a GGUF file.

    :ivar metadata: the file's metadata
    :ivar ids: maps tokens to ids, in the order of ids
    :ivar types: one :class:`TokenType` per token
    """

    metadata: Mapping[str, Any]
    ids: Mapping[str, int]
    types: Sequence[int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> GgufVocabulary:
        """Read and check the vocabulary in the metadata.

        :raises CheckpointError: the vocabulary is missing or malformed
        """
        # Some files have empty tokens. Each needs a distinct name to keep its id.
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(array(metadata, "tokens", str))]
        if not tokens or max(map(len, tokens)) > MAX_TOKEN or sum(map(len, tokens)) > _MAX_TOKENS:
            raise CheckpointError(
                f"tokenizer.ggml.tokens: expected one token or more, of up to {MAX_TOKEN} characters each and "
                f"{_MAX_TOKENS} together"
            )
        ids = {token: id for id, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for id, token in enumerate(tokens) if ids[token] != id)
            raise CheckpointError(f"tokenizer.ggml.tokens holds {shown(twice)} more than once")
        has_types = "tokenizer.ggml.token_type" in metadata
        types = array(metadata, "token_type", int) if has_types else [TokenType.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        return cls(metadata=metadata, ids=MappingProxyType(ids), types=types)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """Return the id of a special token, by its key (``bos_token_id``, ...).

        :raises CheckpointError: the vocabulary has no such id
        """
        value = _plain(self.metadata.get(f"tokenizer.ggml.{key}", default))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.ids):
            raise CheckpointError(
                f"tokenizer.ggml.{key} = {shown(value)} is not a token id: the vocabulary has {len(self.ids)} tokens"
            )
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, by its key (``add_bos_token``, ...).

        :raises CheckpointError: the value is not a boolean
        """
        value = _plain(self.metadata.get(f"tokenizer.ggml.{key}", default))
        if not isinstance(value, int) or value not in (0, 1):
            raise CheckpointError(f"tokenizer.ggml.{key} = {shown(value)}: expected true or false")
        return bool(value)

    def of_type(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of these types, in order."""
        return [id for id, type_ in enumerate(self.types) if type_ in types]


@frozen(kw_only=True)
class BuiltTokenizer:
    """Holds a backend, and the defaults of its kind for what the file does not say.

    :ivar backend: the tokenizer, with tokens spelled as in a tokenizer.json
    :ivar special_ids: maps keys of special tokens to ids
    :ivar add_bos: whether to put the bos token before a text
    :ivar add_eos: whether to put the eos token after a text
    :ivar around: the tokens before and after each text, regardless of the file's flags; None: the flags decide
    :ivar separates: whether to put a separator token between the two texts of a pair
    :ivar takes_token_types: whether the tokens of a pair's second text have token type 1
    """

    backend: tokenizers.Tokenizer
    special_ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False
    around: tuple[int, int] | None = None
    separates: bool = False
    takes_token_types: bool = False


_Entry = TypeVar("_Entry", str, int, float)


def array(metadata: Mapping[str, Any], key: str, kind: type[_Entry]) -> list[_Entry]:
    """Return an array, and check that its entries are of one type; ints are also allowed for float."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise CheckpointError(f"the metadata has no tokenizer.ggml.{key}")
    entries = _plain(value)
    found = set(map(type, entries)) if isinstance(entries, list) else {type(entries)}
    if not isinstance(entries, list) or not found <= ({kind, int} if kind is float else {kind}):
        others = ", ".join(sorted(each.__name__ for each in found))
        raise CheckpointError(f"tokenizer.ggml.{key} holds {others}: expected an array of {kind.__name__}")
    return list(map(kind, entries))


def _plain(value: Any) -> Any:
    """Convert a numpy array or scalar to Python values; return anything else unchanged."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
