"""Keep special tokens that are spelled out in messages from being encoded as special tokens.

A template makes one text of its own marks and the messages' contents, and a tokenizer finds special tokens anywhere in
it: a user who writes ``<|im_end|><|im_start|>system`` would open a turn of his own. Templates transform contents (they
trim, split, join), so a content's position in the rendered text is not known beforehand. But single characters can be
traced. A conversation that spells out special tokens is rendered twice: unchanged, and with one character of each
spelling replaced by a stand-in. If both texts are the same but for the stand-ins, the special tokens in the second text
are the template's own. These are replaced by secret names that no content can hold, and a second tokenizer, with the
same vocabulary, knows special tokens by these names only.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from paged_sdk.chat.backend import TOKEN_FLAGS
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole
from paged_sdk.types.tool import Tool

__all__ = ["Change", "ContentGuard"]

_STAND_INS = tuple(map(chr, range(0x1FB00, 0x1FB93)))
"""Mosaic graphics of old terminals. To Python they are like ``<``: printable, neither letters nor white space."""
_MAX_READ = 8
"""If assistant turns hold more kinds of special tokens, these are not tested one by one."""
_PREFIX = 3
_ASSISTANT = TextMessageRole.ASSISTANT.value

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Changes a message or tool, in the form that a template gets."""
Render = Callable[[Change | None], str]
"""Renders a conversation, after applying a change to its messages and tools."""
Encode = Callable[[tokenizers.Tokenizer, str], list[int]]


class ContentGuard:
    """Encodes conversations so that only the template's own special tokens are special. Thread-safe.

    :param backend: the tokenizer, which is not changed
    :param encode: encodes a text with a given tokenizer of the same vocabulary
    """

    def __init__(self, backend: tokenizers.Tokenizer, encode: Encode) -> None:
        self._backend = backend
        self._encode = encode
        tokens = backend.get_added_tokens_decoder()
        self._added = _Finder(token.content for token in tokens.values())
        self._special = frozenset(token.content for token in tokens.values() if token.special)
        self._spelled = _Finder(self._special, folds=True, finds_beginnings=True)

    def is_needed(self, messages: Iterable[Message], tools: Iterable[Tool] = ()) -> bool:
        """Tell whether any text in messages or tools spells out a special token, or ends with the beginning of one."""
        if any(self._spelled.finds(text) for tool in tools for text in _texts(tool.to_dict())):
            return True
        for message in messages:
            if self._spelled.finds(message.content):
                return True
            has_more = message.name or message.tool_calls or message.tool_call_id or message.reasoning_content
            if has_more and any(map(self._spelled.finds, _texts(message.to_dict()))):
                return True
        return False

    def encode(
        self, render: Render, messages: Sequence[Message], tools: Sequence[Tool] = (), *, source: str
    ) -> list[int]:
        """Return the token ids of a conversation.

        Special tokens that the template itself looks for in assistant turns, such as the marks around reasoning, stay
        special there: they came from the model.

        :param render: renders messages and tools
        :param source: the template's source, whose characters are not used as stand-ins
        :raises InvalidRequestError: the template changes or interprets a spelled-out special token in another turn
        """
        given = [*(message.to_dict() for message in messages), *(tool.to_dict() for tool in tools)]
        used = set(source).union(*(part for each in given for part in _texts(each)))
        # Two attempts: the template may treat the first character specially, as HTML escaping does, or print the time,
        # which may have changed between the two renderings.
        for offset in (0, 1):
            text = render(None)
            unused = [mark for mark in _STAND_INS if mark not in used and mark not in text]
            stand_ins = _StandIns(self._spelled, unused, offset)
            marked = render(stand_ins.changed)
            if stand_ins.restored(marked) != text:
                stand_ins = stand_ins.leaving(self._read_in_answers(render, messages, stand_ins, text))
                marked = render(stand_ins.changed)
            if stand_ins.restored(marked) == text:
                twin = self._twin
                named = stand_ins.restored(self._named(marked, twin.names))
                return [twin.ids.get(id, id) for id in self._encode(twin.backend, named)]
        raise InvalidRequestError(
            "the model's chat template changes or interprets a special token that a message spells out",
            field="messages",
            advice="leave it out, or allow special tokens with RequestBuilder.with_special_tokens_in_content()",
        )

    def _read_in_answers(
        self, render: Render, messages: Sequence[Message], stand_ins: _StandIns, text: str
    ) -> frozenset[str]:
        """Return the special tokens that the template looks for in the assistant's turns."""
        found = {
            token
            for message in messages
            if message.role is TextMessageRole.ASSISTANT
            for part in _texts(message.to_dict())
            for _, _, token in self._spelled.find_all(part)
        }
        if len(found) > _MAX_READ:
            return frozenset()
        return frozenset(
            token for token in found if stand_ins.restored(render(stand_ins.leaving(found - {token}).changed)) != text
        )

    def _named(self, marked: str, names: Mapping[str, str]) -> str:
        """Replace the special tokens that are left in a text by their secret names."""
        pieces = []
        end = 0
        for start, length, token in self._added.find_all(marked):
            if start >= end:
                pieces.append(marked[end:start])
                pieces.append(names.get(token, token))
                end = start + length
        pieces.append(marked[end:])
        return "".join(pieces)

    @cached_property
    def _twin(self) -> _Twin:
        return _Twin(self._backend)


class _Twin:
    """Encodes text in which special tokens have secret names.

    It shares the model of the original tokenizer, so that it takes little memory.

    :ivar backend: the tokenizer with secret names
    :ivar names: maps special tokens to their secret names
    :ivar ids: maps ids of added tokens to their ids in the original tokenizer
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        tokens = sorted(backend.get_added_tokens_decoder().items())
        nonce = secrets.token_hex(8)
        self.names = {token.content: f"\ue000{nonce}.{id}\ue001" for id, token in tokens if token.special}
        self.backend = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self.backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self.backend.pre_tokenizer = backend.pre_tokenizer
        self.ids: dict[int, int] = {}
        for id, token in tokens:
            name = self.names.get(token.content, token.content)
            flags = {flag: getattr(token, flag) for flag in TOKEN_FLAGS}
            self.backend.add_tokens([tokenizers.AddedToken(name, **flags)])
            own = self.backend.token_to_id(name)
            assert own is not None
            self.ids[own] = id


class _Finder:
    """Finds words in texts; of several that begin at the same character, the longest.

    :param folds: ignore case
    :param finds_beginnings: also find beginnings of words at the end of a text, ignoring trailing white space, since
        text after it might complete them
    """

    def __init__(self, words: Iterable[str], *, folds: bool = False, finds_beginnings: bool = False) -> None:
        self._fold: Callable[[str], str] = str.lower if folds else str
        self._words = {self._fold(word): word for word in words if word}
        self._lengths = sorted({len(word) for word in self._words}, reverse=True)
        prefixes = sorted({word[:_PREFIX] for word in self._words})
        # Search for short prefixes: with all words as alternatives, Python's re would try every word at each character.
        self._prefix = re.compile("|".join("".join(map(_either_case if folds else re.escape, p)) for p in prefixes))
        self._starts = sorted(
            {case for word in self._words for case in (word[0], word[0].upper() if folds else word[0])}
        )
        self._beginnings = frozenset(
            word[:length] for word in self._words if finds_beginnings for length in range(1, len(word))
        )

    def finds(self, text: str) -> bool:
        """Tell whether a text holds any word."""
        return any(start in text for start in self._starts) and next(self.find_all(text), None) is not None

    def find_all(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield the index, length and word of each occurrence, also of those that overlap; then the index and length of
        beginnings of words at the end of the text, with an empty word.
        """
        if not self._words:
            return
        position = -1
        while (match := self._prefix.search(text, position + 1)) is not None:
            position = match.start()
            for length in self._lengths:
                if (word := self._words.get(self._fold(text[position : position + length]))) is not None:
                    yield position, length, word
                    break
        if self._beginnings:
            end = len(text.rstrip())
            for start in range(max(0, end - self._lengths[0]), end):
                if self._fold(text[start:end]) in self._beginnings:
                    yield start, end - start, ""


def _either_case(char: str) -> str:
    lower, upper = char.lower(), char.upper()
    return re.escape(char) if lower == upper else f"[{re.escape(lower)}{re.escape(upper)}]"


class _StandIns:
    """Puts stand-ins into messages where they spell out special tokens.

    :param finder: finds the spelled-out tokens
    :param stand_ins: characters that occur nowhere in the conversation
    :param offset: which character of each occurrence to replace
    :param left: tokens that are left unchanged in assistant turns
    """

    def __init__(
        self, finder: _Finder, stand_ins: Sequence[str], offset: int, left: frozenset[str] = frozenset()
    ) -> None:
        self._finder = finder
        self._stand_ins = stand_ins
        self._offset = offset
        self._left = left
        self._stand_in_of: dict[str, str] = {}
        self._original_of: dict[int, str] = {}

    def leaving(self, left: Iterable[str]) -> _StandIns:
        """Return a copy that leaves these tokens unchanged in assistant turns."""
        return _StandIns(self._finder, self._stand_ins, self._offset, frozenset(left))

    def changed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message or tool with stand-ins."""
        left = self._left if message.get("role") == _ASSISTANT else frozenset()
        return {key: part if key == "role" else self._change(part, left) for key, part in message.items()}

    def restored(self, text: str) -> str:
        """Return a text with the original characters in place of stand-ins."""
        return text.translate(self._original_of)

    def _change(self, part: Any, left: frozenset[str]) -> Any:
        if isinstance(part, str):
            found = self._finder.find_all(part)
            replaced = {start + min(self._offset, length - 1) for start, length, token in found if token not in left}
            if not replaced:
                return part
            return "".join(self._stand_in(char) if at in replaced else char for at, char in enumerate(part))
        if isinstance(part, Mapping):
            return {self._change(key, left): self._change(value, left) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [self._change(value, left) for value in part]
        return part

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_in_of:
            if len(self._stand_in_of) == len(self._stand_ins):
                raise InvalidRequestError(
                    "special tokens that the messages spell out begin with too many different characters",
                    field="messages",
                )
            stand_in = self._stand_ins[len(self._stand_in_of)]
            self._stand_in_of[char] = stand_in
            self._original_of[ord(stand_in)] = char
        return self._stand_in_of[char]


def _texts(part: Any) -> Iterator[str]:
    """Yield every string in a message or tool but for its role, in the form that a template gets."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            if key != "role":
                yield from _texts(key)
                yield from _texts(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _texts(value)
