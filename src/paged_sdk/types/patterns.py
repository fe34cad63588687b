"""Translates JSON schema patterns to the regex syntax of the library that compiles them, without changing their
meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["portable_pattern"]

# Standards differ on these classes, so output is restricted to what all agree on: ECMAScript, which JSON Schema refers
# to, and Python and Rust, whose libraries validate the answers.
_SPACES: Final = r"\t-\r\x20\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
_MAY_BE_SPACES: Final = _SPACES + r"\x1c-\x1f\u{85}\u{feff}"
_MAY_BE_LETTERS: Final = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}"
_CLASSES: Final = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", _MAY_BE_LETTERS),
    "s": (_SPACES, _MAY_BE_SPACES),
}
"""The characters that are in a class by all standards, and those that are in it by any."""
_NO_LINE_END: Final = r"[^\n\r\u{2028}\u{2029}]"

_TOKEN: Final = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\c(?P<control>[A-Za-z])|\\0(?![0-9])|\\(?P<class>[dDwWsS])"
    r"|\\(?:u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|[pP][A-Z]|[tnrvf])"
    r"|\\(?P<other>.)|\(\?(?P<group>.[!=<]?)|.",
    re.DOTALL,
)


def portable_pattern(pattern: str) -> str:
    r"""Return an expression for the strings that a pattern matches by every common reading of it.

    Readings differ on ``.`` and ``\s``, on the meaning of ``\d`` and ``\w`` beyond ASCII, and on brackets in brackets.

    :raises ValueError: the pattern cannot be enforced, or is ambiguous; the text says why
    """
    return "".join(_translated(pattern))


def _translated(pattern: str) -> Iterator[str]:
    in_class, is_negated, at = False, False, 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        assert token is not None, "every text begins with a token"
        text, at = token[0], token.end()
        if token["class"]:
            yield _class(token["class"], in_class=in_class, is_negated=is_negated)
        elif token["group"] and not in_class:
            _check_group(token["group"])
            yield "(?"
            at = token.start() + 2
        elif token["other"] is not None:
            yield _escaped(token["other"], in_class=in_class)
        elif token["high"]:
            number = 0x10000 + (int(token["high"], 16) - 0xD800 << 10) + int(token["low"], 16) - 0xDC00
            yield f"\\u{{{number:x}}}"
        elif token["control"]:
            yield f"\\x{ord(token['control']) & 31:02x}"
        elif text == "\\0":
            yield r"\x00"
        elif not in_class and text == "[":
            is_negated = pattern.startswith("^", at)
            first = at + is_negated
            if pattern.startswith("]", first):
                raise ValueError("brackets that begin with a closing one have no one meaning")
            in_class = True
            yield "[^" if is_negated else "["
            at = first
        elif in_class:
            in_class = text != "]"
            # Rust's syntax has nested sets and set operations: escape what would start one.
            yield text if text == "]" or (text not in "[&~" and pattern[at - 2 : at] != "--") else "\\" + text[:1]
            at = token.start() + 1
        else:
            yield _NO_LINE_END if text == "." else text


def _class(name: str, *, in_class: bool, is_negated: bool) -> str:
    certain, possible = _CLASSES[name.lower()]
    if not in_class:
        return f"[{certain}]" if name.islower() else f"[^{possible}]"
    if name.islower():
        return possible if is_negated else certain
    return f"[^{certain}]" if is_negated else f"[^{possible}]"


def _escaped(character: str, *, in_class: bool) -> str:
    if in_class and character == "b":
        return r"\x08"
    if character.isalnum() and character.isascii():
        meaning = "a look-around" if character in "bB" else "a reference" if character in "k123456789" else "an escape"
        raise ValueError(f"\\{character} is {meaning} that is not supported")
    return "\\" + character if character in r"\^$.*+?()[]{}|/-&~" else re.escape(character)


def _check_group(begin: str) -> None:
    """Refuse look-arounds, and flags that change how the rest is read."""
    if begin in ("=", "!", "<=", "<!") or begin[0] in "=!":
        raise ValueError("look-around is not supported")
    if begin[0] not in ":<Pi":
        raise ValueError(f"(?{begin[0]} has no one meaning")
