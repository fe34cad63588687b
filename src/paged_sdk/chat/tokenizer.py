"""Turn text into token ids and back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tokenizers
from attrs import frozen

from paged_sdk.chat.backend import MAX_GROWTH, failing_as, growth_of
from paged_sdk.chat.content_guard import ContentGuard
from paged_sdk.chat.pieces import PieceDecoder
from paged_sdk.chat.tokenizer_config import TokenizerConfig
from paged_sdk.config.checks import is_unicode
from paged_sdk.errors import CheckpointError, InvalidRequestError
from paged_sdk.system.files import read_text

__all__ = ["SpecialTokens", "TextPair", "Tokenizer"]

_MAX_WITH_LOCK: Final = 10_000
"""A longer text is encoded as a batch of one, which releases the GIL: 1.8 million characters took 1.8 seconds, during
which all other threads of the process were blocked."""

# Encoded when a tokenizer is loaded, so that a broken one fails then: letters, white space, U+10FFFD.
_PROBE: Final = "a B\n1 \u00e9\U0010fffd"
_MAX_AROUND: Final = 1000
# SentencePiece's and byte-level normalizers at most quadruple a text. With others, the normalized text is limited to
# this many characters, each of which takes 160 bytes during tokenization.
_USUAL_GROWTH: Final = 4.0
_MAX_NORMALIZED: Final = 1 << 22


@frozen(kw_only=True)
class SpecialTokens:
    """Holds the special tokens that begin, end or surround a text.

    :ivar names: maps template variables to tokens, ``{"bos_token": "<s>", ...}``
    :ivar bos: id of the token that begins a text, or None
    :ivar eos: id of the token that ends a text, or None
    :ivar prefix: ids put before a text
    :ivar suffix: ids put after a text
    :ivar takes_token_types: whether the model takes token types, which tell the two texts of a pair apart
    """

    names: Mapping[str, str] = MappingProxyType({})
    bos: int | None = None
    eos: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    takes_token_types: bool = True


@frozen
class TextPair:
    """Holds the tokens of a pair of texts.

    :ivar token_ids: both texts, with the model's special tokens around them
    :ivar second: indices of the second text's tokens
    :ivar after: the tokens after the second text, which stay if it is truncated
    :ivar second_part: index of the first token with token type 1 (as in BERT); None: all have type 0
    """

    token_ids: list[int]
    second: range
    after: list[int]
    second_part: int | None = None

    def cut(self, most: int) -> TextPair | None:
        """Truncate the second text so that the pair has at most ``most`` tokens; None if the text would be empty."""
        excess = max(len(self.token_ids) - most, 0)
        if excess and excess >= len(self.second):
            return None
        end = self.second.stop - excess
        return TextPair(
            [*self.token_ids[:end], *self.after] if excess else self.token_ids,
            range(self.second.start, end),
            self.after,
            self.second_part,
        )


def _malformed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a tokenizer that can be used: {what}", path=path)


class Tokenizer:
    """Turns text into token ids and back. Thread-safe.

    Special tokens that are spelled out in a text are always recognized, as in transformers, since chat templates write
    them as plain text. :attr:`content_guard` excepts those that messages contain.

    :param backend: a tokenizer of the tokenizers package, without truncation and padding
    :param special: the special tokens around texts, and their names in templates
    :raises CheckpointError: the backend's decoder is neither byte-level nor SentencePiece's nor WordPiece's
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._backend = backend
        self._special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes = _TokenBytes(backend)
        self._text_bytes = _TokenBytes(backend, without=self._special_ids)
        self._kept_bytes: dict[frozenset[int], _TokenBytes] = {}
        self._growth = growth_of(backend)
        self.special = special
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: str | Path, config: TokenizerConfig | None = None) -> Tokenizer:
        """Read a tokenizer.json.

        :param config: the tokenizer_config.json beside it
        :raises CheckpointError: the file cannot be read, or contradicts the config
        """
        path = Path(path)
        text = read_text(path)
        with failing_as(partial(_malformed, path)):
            backend = tokenizers.Tokenizer.from_str(text)
        return cls.from_backend(backend, path, config or TokenizerConfig())

    @classmethod
    def from_backend(cls, backend: tokenizers.Tokenizer, path: Path, config: TokenizerConfig) -> Tokenizer:
        """Make a tokenizer from one of the tokenizers package, which is changed.

        :param path: the file that it was read from
        :param config: the tokenizer_config.json beside it
        :raises CheckpointError: the backend is unusable, or contradicts the config
        """
        malformed = partial(_malformed, path)
        with failing_as(malformed):
            backend.no_truncation()
            backend.no_padding()
            config.add_tokens_to(backend)
            growth = growth_of(backend)
            if growth > MAX_GROWTH:
                raise malformed(f"its normalizer makes a text up to {growth:.3g} times longer")
            backend.encode(_PROBE, add_special_tokens=True)
            ids = {name: backend.token_to_id(text) for name, text in config.special_tokens.items()}
            # tokenizer.json decides, as in transformers, regardless of add_bos_token in an older tokenizer_config.json.
            prefix, suffix = _ids_put_around(backend)
            if len(prefix) + len(suffix) > _MAX_AROUND:
                raise malformed(f"it puts {len(prefix) + len(suffix)} tokens around a text")
            bos, eos = ids.get("bos_token"), ids.get("eos_token")
            special = SpecialTokens(
                names=config.special_tokens,
                bos=bos,
                eos=eos,
                prefix=prefix,
                suffix=suffix,
                takes_token_types=config.takes_token_types,
            )
            return cls(backend, special)

    @classmethod
    def from_json(cls, text: str, special: SpecialTokens) -> Tokenizer:
        """Make a tokenizer from the result of :meth:`to_json`."""
        return cls(tokenizers.Tokenizer.from_str(text), special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        :param add_special_tokens: whether to put the model's special tokens around the text (usually only bos); those
            before it are omitted if the text already begins with them
        :raises InvalidRequestError: the text is not valid Unicode (lone surrogates)
        """
        ids = self._encode(self._backend, text)
        if not add_special_tokens:
            return ids
        prefix = list(self.special.prefix)
        return [*([] if ids[: len(prefix)] == prefix else prefix), *ids, *self.special.suffix]

    def encode_pair(self, first: str, second: str) -> TextPair:
        """Return the token ids of a pair of texts, with the model's special tokens around them.

        :raises InvalidRequestError: a text is not valid Unicode (lone surrogates)
        """
        if not (is_unicode(first) and is_unicode(second)):
            raise InvalidRequestError.of("text", first + second, "Unicode without lone surrogates")
        for text in (first, second):
            self._check_growth(text)
        with failing_as(_failed):
            if len(first) + len(second) > _MAX_WITH_LOCK:
                (encoding,) = self._backend.encode_batch([(first, second)], add_special_tokens=True)
            else:
                encoding = self._backend.encode(first, second, add_special_tokens=True)
        own = [index for index, text in enumerate(encoding.sequence_ids) if text == 1]
        kinds = encoding.type_ids if self.special.takes_token_types else []
        second_range = range(own[0], own[-1] + 1) if own else range(0)
        return TextPair(
            token_ids=encoding.ids,
            second=second_range,
            after=encoding.ids[second_range.stop :],
            second_part=next((index for index, kind in enumerate(kinds) if kind), None),
        )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Invalid UTF-8 becomes U+FFFD; ids beyond the vocabulary have no text."""
        text = self.decode_bytes(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def decode_bytes(
        self, ids: Iterable[int], *, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> bytes:
        """Return the concatenated bytes of tokens.

        :param kept: special tokens that are not skipped
        """
        token_bytes = self._text_bytes if skip_special_tokens else self._bytes
        if kept and skip_special_tokens:
            if kept not in self._kept_bytes:
                self._kept_bytes[kept] = _TokenBytes(self._backend, without=self._special_ids - kept)
            token_bytes = self._kept_bytes[kept]
        return b"".join(map(token_bytes.__getitem__, ids))

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token; an id beyond the vocabulary has none."""
        return self._bytes[id]

    def token_id(self, piece: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None."""
        return self._backend.token_to_id(piece)

    def piece(self, id: int) -> str | None:
        """Return the spelling of a token in the vocabulary, or None."""
        return self._backend.id_to_token(id)

    def first_difference(self, other: Tokenizer) -> int | None:
        """Return the lowest token id whose token is different or missing in another vocabulary; None: there is none."""
        spelling = other._backend.id_to_token
        pieces = self._backend.get_vocab(with_added_tokens=True)
        return min((id for piece, id in pieces.items() if spelling(id) != piece), default=None)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json for this tokenizer."""
        return self._backend.to_str()

    def num_beyond(self, vocab_size: int) -> int:
        """Count the tokens whose id is at least ``vocab_size``."""
        added = self._backend.get_added_tokens_decoder()
        others = range(vocab_size, self._backend.get_vocab_size(with_added_tokens=False))
        return len({*others, *(id for id in added if id >= vocab_size)})

    def is_special(self, id: int) -> bool:
        """Tell whether a token is special, not text."""
        return id in self._special_ids

    @cached_property
    def content_guard(self) -> ContentGuard:
        """Return the encoder of conversations whose messages spell out special tokens."""
        return ContentGuard(self._backend, self._encode)

    @property
    def strips_leading_space(self) -> bool:
        """Tell whether decoding strips one leading space, because encoding adds one."""
        return self._bytes.pieces.strips_leading_space

    def _encode(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Encode a text with a backend that has the same normalizer as this tokenizer."""
        self._check_growth(text)
        try:
            with failing_as(_failed):
                if len(text) > _MAX_WITH_LOCK:
                    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
                return backend.encode(text, add_special_tokens=False).ids
        except InvalidRequestError as exc:
            if isinstance(exc.__cause__, TypeError):  # the package's error for lone surrogates
                raise InvalidRequestError.of("text", text, "Unicode without lone surrogates") from exc.__cause__
            raise

    def _check_growth(self, text: str) -> None:
        """Refuse a text whose normalized form may be too long."""
        if self._growth > _USUAL_GROWTH and len(text) * self._growth > _MAX_NORMALIZED:
            raise InvalidRequestError(
                f"the text has {len(text)} characters, which the model's tokenizer may make {self._growth:.3g} times "
                f"longer: at most {int(_MAX_NORMALIZED / self._growth)} are allowed",
                field="text",
            )


class _TokenBytes(dict[int, bytes]):
    """Caches the bytes of tokens; ids beyond the vocabulary and those in ``without`` have none.

    It is a dict, because incremental detokenization looks up one token at a time.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, without: Container[int] = ()) -> None:
        self.pieces = PieceDecoder.of(backend)
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._without = without

    def __missing__(self, id: int) -> bytes:
        piece = None if id in self._without else self._backend.id_to_token(id)
        data = self[id] = b"" if piece is None else self.pieces.to_bytes(piece, literal=id in self._added)
        return data


def _failed(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the model's tokenizer failed at this text: {what}", field="text")


def _ids_put_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Determine the tokens that the backend's post-processor puts before and after a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids: Sequence[int] = encoding.ids
    own = [position for position, special in enumerate(encoding.special_tokens_mask) if not special]
    first, last = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
    return tuple(ids[:first]), tuple(ids[last:])
