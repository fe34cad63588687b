"""Make a tokenizer of tiktoken.model, which Moonshot's checkpoints (Moonlight, Kimi) have instead of a tokenizer.json.

The file lists tokens with their ranks (https://github.com/openai/tiktoken). How text is split into words is in Python
code beside it, which is not run: the pattern is known here, by the name of the code's class.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tokenizers
from attrs import evolve
from tokenizers import decoders, models

from paged_sdk.chat.backend import failing_as
from paged_sdk.chat.gguf_tokenizer import word_splitter
from paged_sdk.chat.gguf_vocabulary import MAX_TOKEN
from paged_sdk.chat.pieces import BYTE_LEVEL_ALPHABET
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS
from paged_sdk.chat.tokenizer_config import TokenizerConfig
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import read_text

__all__ = ["TIKTOKEN_CLASSES", "backend_from_tiktoken", "with_reserved_tokens"]

TIKTOKEN_CLASSES: Final[Mapping[str, str]] = MappingProxyType({"TikTokenTokenizer": "kimi-k2"})
"""Maps ``tokenizer_class`` of tokenizer_config.json to the name of the pre-tokenizer."""

# Every split of every token is looked up. The largest file in use, Kimi's, has 1.1 million bytes.
_MAX_BYTES: Final = 1 << 24
_MAX_RESERVED: Final = 1 << 12  # Kimi has 256
_SPELLED: Final = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}


def backend_from_tiktoken(path: Path, pre_tokenizer: str) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer of a file of tokens and ranks.

    tiktoken merges the two tokens whose merged token has the lowest rank. Here all pairs that make a token are merges,
    ordered by the token's rank. A word that is a token is not split, as in tiktoken.

    :param path: the file: on each line a token in base64, and its rank
    :param pre_tokenizer: a key of :data:`PRE_TOKENIZERS`
    :raises CheckpointError: the file cannot be read, or is malformed
    """

    def malformed(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a tokenizer that can be used: {what}", path=path)

    tokens = [_token(line, rank, malformed) for rank, line in enumerate(read_text(path).splitlines())]
    ids = {token: rank for rank, token in enumerate(tokens)}
    if len(ids) != len(tokens) or not all(character in ids for character in BYTE_LEVEL_ALPHABET):
        raise malformed("it has a token twice, or lacks one of the 256 bytes")
    if max(map(len, tokens)) > MAX_TOKEN or sum(map(len, tokens)) > _MAX_BYTES:
        raise malformed(f"tokens may have {MAX_TOKEN} bytes each, and {_MAX_BYTES} together")
    with failing_as(malformed):
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=_merges(ids), ignore_merges=True))
    backend.pre_tokenizer = word_splitter(PRE_TOKENIZERS[pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    return backend


def _token(line: str, rank: int, malformed: Callable[[str], CheckpointError]) -> str:
    """Return the token of a line, spelled in GPT-2's alphabet."""
    encoded, _, number = line.partition(" ")
    try:
        token = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        token = b""
    if not token or number != str(rank):
        raise malformed(f"line {rank + 1} is {shown(line)}: expected a token in base64 and the rank {rank}")
    return "".join(map(_SPELLED.__getitem__, token))


def _merges(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """List all pairs of tokens that make a token, by its rank, then by those of the two."""
    return [
        pair
        for token in ids
        for pair in sorted(
            ((token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
    ]


def with_reserved_tokens(config: TokenizerConfig, num_tokens: int) -> TokenizerConfig:
    """Return the config with a token for each id that the tokens added to a vocabulary leave out, as Moonshot's code
    has it.

    :param num_tokens: the size of the vocabulary
    """
    reserved = {
        id: {"content": f"<|reserved_token_{id}|>", "special": True}
        for id in range(num_tokens, min(max(config.added_tokens, default=0), num_tokens + _MAX_RESERVED))
    }
    return evolve(config, added_tokens=reserved | dict(config.added_tokens))
