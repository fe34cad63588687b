"""Compare a tokenizer's vocabulary with its model's."""

from __future__ import annotations

from pathlib import Path

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.logs import get_logger

__all__ = ["check_same_tokens", "check_vocabulary"]

_log = get_logger(__name__)


def check_same_tokens(target: Tokenizer, draft: Tokenizer, location: str) -> None:
    """Check that every token of a target is the same token in its draft model.

    :param location: the draft model, for messages
    :raises ConfigError: a token differs
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
    """Check that the model has an embedding for every token.

    Models often have more embeddings than tokens (Qwen2.5 has 151,936 for 151,665 tokens). There are also checkpoints
    whose tokenizer has a few added tokens, such as one for padding, without embeddings: these load with a warning, and
    requests with such a token are refused.

    :param vocab_size: number of the model's embeddings
    :param path: the checkpoint, for messages
    :param is_own: whether the token list is that of the GGUF file itself, in which each token must have an embedding
    :raises CheckpointError: a GGUF file has more tokens than embeddings, which llama.cpp refuses too; or the tokenizer
        adds a token without an embedding to every text, so that every request would be refused
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
