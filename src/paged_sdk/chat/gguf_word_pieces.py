"""Build a WordPiece tokenizer (BERT) from the vocabulary of a GGUF file."""

from __future__ import annotations

import string
from types import MappingProxyType
from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from paged_sdk.chat.gguf_vocabulary import BuiltTokenizer, GgufVocabulary, TokenType
from paged_sdk.errors import CheckpointError, shown

__all__ = ["word_pieces"]

_BEGINS: Final = "▁"
_CONTINUES: Final = "##"
_MOST_SIGNS: Final = 0.1
"""If more than this share of the tokens begins with two SentencePiece signs, these are not word pieces: BERT's own
vocabularies have no such tokens."""

# Ids in Google's original vocabularies, which llama.cpp assumes if a file has no such keys.
_GOOGLES_IDS: Final = MappingProxyType(
    {"bos_token_id": 101, "eos_token_id": 102, "unknown_token_id": 100, "padding_token_id": 0}
)


def word_pieces(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build the tokenizer. Words are split at white space, punctuation and Chinese characters. Each word is matched
    greedily by the longest pieces, or is unknown.

    Older files do not say whether the tokenizer is cased. llama.cpp then lowercases; here, a vocabulary with capitals
    is cased.

    :raises CheckpointError: the vocabulary is not WordPiece, has duplicate pieces, or lacks special tokens for unknown
        words or around a text
    """
    if sum(token.startswith(2 * _BEGINS) for token in vocabulary.ids) > _MOST_SIGNS * len(vocabulary.ids):
        raise CheckpointError(
            "tokenizer.ggml.tokens are SentencePiece's, which a converter has taken for word pieces: give the model's "
            "own tokenizer.json with with_tokenizer_json"
        )
    pieces: dict[str, int] = {}
    for (token, id), type_ in zip(vocabulary.ids.items(), vocabulary.types, strict=True):
        piece = token if type_ == TokenType.CONTROL else _piece(token)
        if pieces.setdefault(piece, id) != id:
            raise CheckpointError(f"tokenizer.ggml.tokens holds {shown(piece)} more than once")
    special_ids = _GOOGLES_IDS if len(pieces) > max(_GOOGLES_IDS.values()) else {}
    unknown = vocabulary.token_id("unknown_token_id", special_ids.get("unknown_token_id"))
    begin = vocabulary.token_id("bos_token_id", vocabulary.token_id("cls_token_id", special_ids.get("bos_token_id")))
    end = vocabulary.token_id("seperator_token_id", special_ids.get("eos_token_id"))
    if unknown is None or begin is None or end is None:
        raise CheckpointError(
            "the metadata does not say which token stands for unknown words, and which stand before and after a text"
        )
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
    found = {"bos_token_id": begin, "eos_token_id": end, "unknown_token_id": unknown}
    return BuiltTokenizer(
        backend=backend, special_ids={**special_ids, **found}, around=(begin, end), takes_token_types=True
    )


def _piece(token: str) -> str:
    """Return a piece as spelled in a tokenizer.json: GGUF marks pieces that begin a word, tokenizer.json all others."""
    return token.removeprefix(_BEGINS) if token.startswith(_BEGINS) else _CONTINUES + token


def _has_capitals(vocabulary: GgufVocabulary) -> bool:
    return any(_BEGINS + letter in vocabulary.ids for letter in string.ascii_uppercase)
