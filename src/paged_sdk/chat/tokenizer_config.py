"""Read tokenizer_config.json: settings of a checkpoint's tokenizer that are not in tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from attrs import field, frozen

from paged_sdk.chat.backend import TOKEN_FLAGS
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import read_json_if_there

__all__ = ["TokenizerConfig"]

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNLIMITED = 1 << 40
"""Larger context lengths mean none: transformers writes 1e30 for a context without a limit."""


@frozen(kw_only=True)
class TokenizerConfig:
    """Holds the used part of tokenizer_config.json.

    :ivar special_tokens: maps names to tokens, ``{"bos_token": "<s>", ...}``
    :ivar extra_special_tokens: other special tokens
    :ivar added_tokens: maps ids to the content and flags of added tokens
    :ivar tokenizer_class: the name of the class that transformers takes, or None
    :ivar chat_template: a template, a list of named ones, or None
    :ivar model_max_length: context length in tokens, or None
    :ivar takes_token_types: whether the model takes token types, as BERT does; False only if ``model_input_names`` is
        set without ``token_type_ids``
    :ivar path: the file, for error messages
    """

    special_tokens: Mapping[str, str] = field(default=MappingProxyType({}))
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default=MappingProxyType({}))
    tokenizer_class: str | None = None
    chat_template: object = None
    model_max_length: int | None = None
    takes_token_types: bool = True
    path: Path | None = None

    @classmethod
    def read(cls, directory: Path) -> TokenizerConfig:
        """Read the config in a checkpoint's directory; it is empty if there is no tokenizer_config.json.

        Older checkpoints have special tokens only in special_tokens_map.json, which is read, too.

        :raises CheckpointError: a file is malformed
        """
        path = directory / "tokenizer_config.json"
        content = {
            **read_json_if_there(directory / "special_tokens_map.json"),
            **read_json_if_there(path),
        }
        try:
            return cls(
                special_tokens={name: _text(content[name]) for name in _NAMES if content.get(name) is not None},
                extra_special_tokens=tuple(_texts(content)),
                added_tokens={int(id): dict(token) for id, token in content.get("added_tokens_decoder", {}).items()},
                tokenizer_class=name if isinstance(name := content.get("tokenizer_class"), str) else None,
                chat_template=content.get("chat_template"),
                model_max_length=_context(content.get("model_max_length")),
                takes_token_types="token_type_ids" in (content.get("model_input_names") or ["token_type_ids"]),
                path=path,
            )
        except (TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise CheckpointError(f"{path} is malformed: {str(exc)[:300]}", path=path) from exc

    def add_tokens_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add to a tokenizer the tokens that only this file has, and mark the special ones.

        :raises CheckpointError: a token would get another id than in this file
        """
        known = backend.get_added_tokens_decoder()
        for id, token in sorted(self.added_tokens.items()):
            flags = {flag: bool(token[flag]) for flag in TOKEN_FLAGS if flag in token}
            wanted = tokenizers.AddedToken(_text(token), **flags)
            # tokenizer.json wins if the two files give a token different ids.
            if known.get(id) == wanted or backend.token_to_id(wanted.content) not in (None, id):
                continue
            backend.add_tokens([wanted])
            if (got := backend.token_to_id(wanted.content)) != id:
                raise CheckpointError(
                    f"{self.path} gives token {shown(wanted.content)} the id {id}, but tokenizer.json gives it {got}",
                    path=self.path,
                )
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        texts = dict.fromkeys([*self.special_tokens.values(), *self.extra_special_tokens])
        backend.add_special_tokens(
            [tokenizers.AddedToken(text, normalized=False, special=True) for text in texts if text not in special]
        )


def _text(token: object) -> str:
    """Return the text of a token, which is stored as a string or as an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise TypeError(f"{shown(token)} is not a token: expected a string or an object with a string as content")
    return text


def _texts(content: Mapping[str, Any]) -> Iterable[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = content.get(key) or ()
        yield from map(_text, tokens.values() if isinstance(tokens, Mapping) else tokens)


def _context(value: Any) -> int | None:
    if value is None or value >= _UNLIMITED:
        return None
    if isinstance(value, bool) or not value >= 1:
        raise ValueError(f"model_max_length = {shown(value)}: expected a number of at least 1")
    return int(value)
