"""Build a tokenizer of BERT's kind (WordPiece) from the vocabulary that a GGUF file holds."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from paged_sdk.chat.gguf_vocabulary import BuiltTokenizer, GgufVocabulary, TokenType
from paged_sdk.errors import CheckpointError, shown

__all__ = ["word_pieces"]

_BEGINS: Final = "▁"
_CONTINUES: Final = "##"
_CAPITAL: Final = re.compile("[A-Z]")

# The places of these tokens in Google's own vocabularies, which llama.cpp takes where a file says nothing.
_GOOGLES_IDS: Final = MappingProxyType({"bos_token_id": 101, "unknown_token_id": 100, "padding_token_id": 0})
_GOOGLES_SEPARATOR: Final = 102


def word_pieces(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build the tokenizer: white space, punctuation and Chinese characters part words, of which each is spelled by the
    longest pieces from its beginning on, or is unknown.

    Whether it tells capitals apart, older files do not say, of which llama.cpp makes small letters. A vocabulary with
    capitals in it does here.

    :raises CheckpointError: two tokens have one spelling, or there is none for unknown words
    """
    pieces: dict[str, int] = {}
    for (token, id), type_ in zip(vocabulary.ids.items(), vocabulary.types, strict=True):
        piece = token if type_ == TokenType.CONTROL else _piece(token)
        if pieces.setdefault(piece, id) != id:
            raise CheckpointError(f"tokenizer.ggml.tokens holds {shown(piece)} more than once")
    special_ids = _GOOGLES_IDS if len(pieces) > _GOOGLES_SEPARATOR else {}
    separator = vocabulary.token_id("seperator_token_id", _GOOGLES_SEPARATOR if special_ids else None)
    unknown = vocabulary.token_id("unknown_token_id", special_ids.get("unknown_token_id"))
    if unknown is None or separator is None:
        raise CheckpointError("the metadata does not say which tokens stand for unknown words and for a text's end")
    names = list(pieces)
    backend = tokenizers.Tokenizer(
        models.WordPiece(pieces, unk_token=names[unknown], continuing_subword_prefix=_CONTINUES)
    )
    lower = vocabulary.flag("normalizer.lowercase", default=not _has_capitals(vocabulary))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=vocabulary.flag("normalizer.strip_accents", default=lower)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return BuiltTokenizer(
        backend=backend,
        add_bos=True,
        special_ids={**special_ids, "eos_token_id": separator},
        add_eos=True,
        tells_parts=True,
    )


def _piece(token: str) -> str:
    """Return a piece as a tokenizer.json spells it: GGUF marks those that begin words, and not those that go on."""
    return token.removeprefix(_BEGINS) if token.startswith(_BEGINS) else _CONTINUES + token


def _has_capitals(vocabulary: GgufVocabulary) -> bool:
    kinds = zip(vocabulary.ids, vocabulary.types, strict=True)
    return any(type_ == TokenType.NORMAL and _CAPITAL.search(token) for token, type_ in kinds)
