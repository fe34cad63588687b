"""Make prompts from the Python language reference, which comes with every Python (pydoc's help topics)."""

from __future__ import annotations

import random
from functools import cache
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from benchmarks.protocol import Prompt
from paged_sdk.chat.text_processor import text_processor_from_gguf
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["PromptMaker", "prose", "tokenizer_of"]

# Well above the characters per token of English text with any tokenizer in use.
_CHARACTERS_PER_TOKEN: Final = 16

_PROSE_TOPICS: Final = ("objects", "naming", "import", "exceptions", "debugger", "types")


@cache
def _reference() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


def prose() -> str:
    """Return continuous English text, always the same for one version of Python."""
    return "\n".join(topics[name] for name in _PROSE_TOPICS)


class PromptMaker:
    """Makes prompts of an exact number of tokens.

    Prompts of different keys have at most a token or two in common at their start, so that no prefix cache helps,
    except where that is measured.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def make(self, num_tokens: int, key: str) -> Prompt:
        """Make a prompt; the same key gives the same prompt."""
        text = _reference()
        num_characters = num_tokens * _CHARACTERS_PER_TOKEN
        start = random.Random(key).randrange(len(text) - num_characters)
        beginning = sha256(key.encode()).hexdigest()[:12]
        return self._prompt(f"{beginning} {text[start : start + num_characters]}", num_tokens)

    def extend(self, prompt: Prompt, num_tokens: int, key: str) -> Prompt:
        """Make a prompt that begins with another."""
        token_ids = prompt.token_ids + self.make(num_tokens, key).token_ids
        return Prompt(self._tokenizer.decode(token_ids), token_ids)

    def _prompt(self, text: str, num_tokens: int) -> Prompt:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
        assert len(token_ids) == num_tokens, (len(token_ids), num_tokens)
        return Prompt(self._tokenizer.decode(token_ids), token_ids)


def tokenizer_of(gguf: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file."""
    checkpoint = open_checkpoint(gguf)
    assert checkpoint.metadata is not None, "only GGUF files have their tokenizer inside"
    checkpoint.source.close()
    return text_processor_from_gguf(checkpoint.metadata).tokenizer
