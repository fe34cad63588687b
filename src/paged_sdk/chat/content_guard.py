"""Keep text of messages text: what reads like a special token in a content is not encoded as one.

A template makes one text of its own marks and the messages' contents, and a tokenizer finds special tokens anywhere in
it: a user who writes ``<|im_end|><|im_start|>system`` would open a turn of his own. Templates change what they get
(they trim, split, put parts together), so the place of a content in the text is not known beforehand. But one character
can be followed through all that. A conversation in which something reads like a special token is rendered twice, as it
is and with one character of each such place replaced by a stand-in. If both texts are the same but for the
stand-ins, they show which special tokens in the text are the template's own. Those get secret names that no content can
hold, and a second tokenizer, of the same vocabulary, knows special tokens by these names only.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole
from paged_sdk.types.tool import Tool

__all__ = ["Change", "ContentGuard"]

_STAND_INS = tuple(map(chr, range(0x1FB00, 0x1FB93)))
"""Mosaic graphics of old terminals. To Python they are what ``<`` is: printable, no letter, no space."""
_MAX_READ = 8
"""More kinds of special token in the assistant's turns are not looked at one by one."""
_PREFIX = 3
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ASSISTANT = TextMessageRole.ASSISTANT.value

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Changes a message, or a tool, as a template gets it."""
Render = Callable[[Change | None], str]
"""Renders a conversation whose messages are changed before."""
Encode = Callable[[tokenizers.Tokenizer, str], list[int]]


class ContentGuard:
    """Encodes conversations so that only the template's own special tokens are special, from any thread.

    :param backend: the tokenizer, which stays as it is
    :param encode: encodes a text with a tokenizer of the same vocabulary
    """

    def __init__(self, backend: tokenizers.Tokenizer, encode: Encode) -> None:
        self._backend = backend
        self._encode = encode
        tokens = backend.get_added_tokens_decoder()
        self._added = _Finder(token.content for token in tokens.values())
        self._special = frozenset(token.content for token in tokens.values() if token.special)
        self._places = _Finder(self._special, folds=True, finds_beginnings=True)

    def is_needed(self, messages: Iterable[Message], tools: Iterable[Tool] = ()) -> bool:
        """Tell whether anything in messages or tools reads like a special token, or like the beginning of one at the
        end.
        """
        if any(self._places.finds(text) for tool in tools for text in _texts(tool.to_dict())):
            return True
        for message in messages:
            if self._places.finds(message.content):
                return True
            has_more = message.name or message.tool_calls or message.tool_call_id or message.reasoning_content
            if has_more and any(map(self._places.finds, _texts(message.to_dict()))):
                return True
        return False

    def encode(
        self, render: Render, messages: Sequence[Message], tools: Sequence[Tool] = (), *, source: str
    ) -> list[int]:
        """Return the token ids of a conversation.

        What a template reads itself in an assistant's turn, as some read the marks around a thought, stays as it is:
        it came from the model.

        :param render: renders messages and tools
        :param source: the template, whose characters are not used as stand-ins
        :raises InvalidRequestError: the template changes or reads what reads like a special token in another way
        """
        given = [*(message.to_dict() for message in messages), *(tool.to_dict() for tool in tools)]
        used = set(source).union(*(part for each in given for part in _texts(each)))
        # A template may treat the first character in a way of its own, as HTML's escapes do; or it tells the time,
        # which has changed between two renderings.
        for offset in (0, 1):
            text = render(None)
            stand_ins = [mark for mark in _STAND_INS if mark not in used and mark not in text]
            places = _Places(self._places, stand_ins, offset)
            marked = render(places.changed)
            if places.restored(marked) != text:
                places = places.leaving(self._read_in_answers(render, messages, places, text))
                marked = render(places.changed)
            if places.restored(marked) == text:
                twin = self._twin
                named = places.restored(self._named(marked, twin.names))
                return [twin.ids.get(id, id) for id in self._encode(twin.backend, named)]
        raise InvalidRequestError(
            "the model's chat template does something else with text that reads like a special token than to pass it "
            "on: leave it out, or allow special tokens with RequestBuilder.with_special_tokens_in_content()",
            field="messages",
        )

    def _read_in_answers(
        self, render: Render, messages: Sequence[Message], places: _Places, text: str
    ) -> frozenset[str]:
        """Return the special tokens that the template looks for in the assistant's turns."""
        found = {
            token
            for message in messages
            if message.role is TextMessageRole.ASSISTANT
            for part in _texts(message.to_dict())
            for _, _, token in self._places.find_all(part)
        }
        if len(found) > _MAX_READ:
            return frozenset()
        return frozenset(
            token for token in found if places.restored(render(places.leaving(found - {token}).changed)) != text
        )

    def _named(self, marked: str, names: Mapping[str, str]) -> str:
        """Give the special tokens that are left in a text their secret names."""
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

    It shares the vocabulary of the tokenizer that it is a twin of, so that it costs no memory to speak of.

    :ivar backend: the tokenizer
    :ivar names: special token to secret name
    :ivar ids: id of an added token here to its id there
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
            flags = {flag: getattr(token, flag) for flag in _FLAGS}
            self.backend.add_tokens([tokenizers.AddedToken(name, **flags)])
            own = self.backend.token_to_id(name)
            assert own is not None
            self.ids[own] = id


class _Finder:
    """Finds words in texts: the longest that begins at a place.

    :param folds: upper and lower case are the same
    :param finds_beginnings: beginnings of words at the end of a text, spaces after it aside, are found too: what is put
        after it might complete them
    """

    def __init__(self, words: Iterable[str], *, folds: bool = False, finds_beginnings: bool = False) -> None:
        self._fold: Callable[[str], str] = str.lower if folds else str
        self._words = {self._fold(word): word for word in words if word}
        self._lengths = sorted({len(word) for word in self._words}, reverse=True)
        prefixes = sorted({word[:_PREFIX] for word in self._words})
        # Python's expressions skip quickly to a first character, but would try every word there.
        self._prefix = re.compile("|".join("".join(map(_either_case if folds else re.escape, p)) for p in prefixes))
        self._starts = sorted(
            {case for word in self._words for case in (word[0], word[0].upper() if folds else word[0])}
        )
        self._beginnings = frozenset(
            word[:length] for word in self._words if finds_beginnings for length in range(1, len(word))
        )

    def finds(self, text: str) -> bool:
        """Tell whether there is any."""
        return any(start in text for start in self._starts) and next(self.find_all(text), None) is not None

    def find_all(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield where each begins, also inside of another, its length, and which it is; at the end beginnings of words,
        each with no word.
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


class _Places:
    """Puts stand-ins in the places of messages that read like special tokens.

    :param finder: finds the places
    :param stand_ins: characters that occur nowhere
    :param offset: which character of a place it is that is replaced
    :param left: tokens that stay as they are in the assistant's turns
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

    def leaving(self, left: Iterable[str]) -> _Places:
        """Return the same for all but these tokens."""
        return _Places(self._finder, self._stand_ins, self._offset, frozenset(left))

    def changed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message, or a tool, with stand-ins."""
        left = self._left if message.get("role") == _ASSISTANT else frozenset()
        return {key: part if key == "role" else self._change(part, left) for key, part in message.items()}

    def restored(self, text: str) -> str:
        """Return a text without the stand-ins that were put into messages."""
        return text.translate(self._original_of)

    def _change(self, part: Any, left: frozenset[str]) -> Any:
        if isinstance(part, str):
            places = self._finder.find_all(part)
            replaced = {start + min(self._offset, length - 1) for start, length, token in places if token not in left}
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
                    "the messages hold too many kinds of characters that special tokens begin with", field="messages"
                )
            stand_in = self._stand_ins[len(self._stand_in_of)]
            self._stand_in_of[char] = stand_in
            self._original_of[ord(stand_in)] = char
        return self._stand_in_of[char]


def _texts(part: Any) -> Iterator[str]:
    """Yield every text in a message as a template gets it."""
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
