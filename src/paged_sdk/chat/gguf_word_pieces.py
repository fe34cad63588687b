"""Build a tokenizer of BERT's kind (WordPiece) from the vocabulary that a GGUF file holds."""

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
"""The share of a vocabulary of word pieces that begins with SentencePiece's sign, at most: BERT's own have none."""

# The places of these tokens in Google's own vocabularies, which llama.cpp takes where a file says nothing.
_GOOGLES_IDS: Final = MappingProxyType(
    {"bos_token_id": 101, "eos_token_id": 102, "unknown_token_id": 100, "padding_token_id": 0}
)


def word_pieces(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build the tokenizer: white space, punctuation and Chinese characters part words, of which each is spelled by the
    longest pieces from its beginning on, or is unknown.

    Whether it tells capitals apart, older files do not say, of which llama.cpp makes small letters. A vocabulary with
    capitals in it does here.

    :raises CheckpointError: these are other pieces, or none is for unknown words or around a text, or two are the same
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
        raise CheckpointError("the metadata does not say which tokens stand for unknown words, and around a text")
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
    return BuiltTokenizer(backend=backend, special_ids={**special_ids, **found}, around=(begin, end), tells_parts=True)


def _piece(token: str) -> str:
    """Return a piece as a tokenizer.json spells it: GGUF marks those that begin words, and not those that go on."""
    return token.removeprefix(_BEGINS) if token.startswith(_BEGINS) else _CONTINUES + token


def _has_capitals(vocabulary: GgufVocabulary) -> bool:
    return any(_BEGINS + letter in vocabulary.ids for letter in string.ascii_uppercase)
