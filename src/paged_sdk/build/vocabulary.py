"""Compare a tokenizer's vocabulary with its model's."""

from __future__ import annotations

from pathlib import Path

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.logs import get_logger

__all__ = ["check_same_tokens", "check_vocabulary"]

_log = get_logger(__name__)


def check_same_tokens(target: Tokenizer, draft: Tokenizer, location: str) -> None:
    """Check that every token of a target is the same token of the model that is to guess for it.

    :param location: the smaller model, for messages
    :raises ConfigError: one is not
    """
    token_id = target.first_difference(draft)
    if token_id is not None:
        own, other = (tokenizer.piece(token_id) for tokenizer in (target, draft))
        raise ConfigError(
            f"{location} cannot guess for this model: token {token_id} is {other!r} there and {own!r} here",
            setting="draft",
            value=location,
            allowed="a model with the same vocabulary",
        )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: Path, *, is_own: bool) -> None:
    """Look for token ids that the model has no embedding for.

    A model with more embeddings than tokens is usual (Qwen2.5 has 151,936 for 151,665 tokens). The other way round,
    checkpoints are in use whose tokenizer has a few added tokens, such as one for padding, that the model was never
    given: these load with a warning, and a request that holds such a token is refused by itself.

    :param vocab_size: how many embeddings the model has
    :param path: the checkpoint, for messages
    :param is_own: the token list is that of the GGUF file itself, to which embeddings belong one by one
    :raises CheckpointError: a GGUF file has more tokens than embeddings, as llama.cpp refuses it too; or the tokenizer
        puts a token without an embedding around every text, so that none could be answered
    """
    around = [id for id in (*tokenizer.special.prefix, *tokenizer.special.suffix) if id >= vocab_size]
    if around:
        raise CheckpointError(
            f"the tokenizer of {path.name} puts token id {around[0]} around every text, "
            f"but the model's vocabulary has {vocab_size} tokens",
            path=path,
        )
    num_beyond = tokenizer.num_beyond(vocab_size)
    if not num_beyond:
        return
    what = f"{num_beyond} tokens of {path.name} have ids beyond the model's vocabulary of {vocab_size}"
    if is_own:
        raise CheckpointError(f"{what}: tokenizer.ggml.tokens does not belong to token_embd.weight", path=path)
    _log.warning("%s: requests that hold one are refused.", what)
