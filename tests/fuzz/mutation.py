"""Change files as accidents and attackers do: bytes, fields of JSON, values and types of GGUF metadata."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any, Final

from attrs import evolve, frozen

__all__ = ["GgufContent", "GgufEntry", "GgufValue", "mutated_bytes", "mutated_gguf", "mutated_json"]

HOSTILE: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 3, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 10**400, 0.0,
    -0.0, 0.5, -1.5, 1e-320, 1e38, 1e300, float("inf"), float("-inf"), float("nan"), "", " ", "0", "a", "\u00e9",
    "\ud800", "\0", "../x", "x" * 5000, "{{", "{% for", "<unk>", "silu", "yarn", "longrope", "default", [], [0], [None],
    ["a"], [[[]]], [0] * 1000, {}, {"a": 1}, {"type": "Sequence"}, {"String": ""}, {"Regex": "(a*)*b"},
    {"content": "\udfff"},
)  # fmt: skip

_WORDS: Final = (
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff" * 4,
    struct.pack("<Q", 2**63),
    struct.pack("<Q", 2**32),
    b"\x80",
    b"{",
    b'"',
)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some replaced, removed, repeated or cut off; most changes fall where a header is."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        size = len(changed)
        if size == 0:
            break
        place = int(size * rng.random() ** rng.choice((1, 3)))
        match rng.randrange(6):
            case 0:
                changed[place] = rng.randrange(256)
            case 1:
                changed[place] ^= 1 << rng.randrange(8)
            case 2:
                word = rng.choice(_WORDS)
                changed[place : place + len(word)] = word
            case 3:
                del changed[place : place + rng.choice((1, 4, 8, 64, size))]
            case 4:
                other = rng.randrange(size)
                changed[place:place] = changed[other : other + rng.choice((1, 8, 64))]
            case _:
                value = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1, rng.getrandbits(32))))
                changed[place : place + 4] = value
    return bytes(changed)


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """Return the JSON of a value of which some parts, however deep, are replaced, removed, moved or repeated."""
    changed = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        changed = _changed(rng, changed)
    text = json.dumps(changed, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, text) if rng.random() < 0.08 else text


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(10):
            case 0:
                del value[key]
            case 1:
                value[str(rng.choice(HOSTILE))[:20]] = copy.deepcopy(value[key])
            case 2:
                value[key] = copy.deepcopy(value[rng.choice(list(value))])
            case _:
                value[key] = _changed(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                del value[place]
            case 1:
                value[place:place] = [copy.deepcopy(value[place]) for _ in range(rng.choice((1, 2, 50)))]
            case 2:
                value.append(copy.deepcopy(rng.choice(HOSTILE)))
            case _:
                value[place] = _changed(rng, value[place])
        return value
    return _other(rng, value)


def _other(rng: random.Random, value: Any) -> Any:
    kind = rng.randrange(8)
    if isinstance(value, int | float) and not isinstance(value, bool) and kind < 3:
        try:
            return value * rng.choice((-1, 0, 2, 10, 1000, 1e9)) + rng.choice((0, 1, -1, 0.5))
        except OverflowError:
            return 0
    if isinstance(value, str) and kind < 3:
        place = rng.randrange(len(value) + 1)
        return value[:place] + rng.choice(("", "\ud800", "\0", "a" * 3000, "(a+)+", "{%", value)) + value[place:]
    if kind == 3:
        return [value]
    if kind == 4:
        return {"a": value}
    return copy.deepcopy(rng.choice(HOSTILE))


_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@frozen
class GgufValue:
    """Holds a metadata value: its type's number, and bytes as they stand in a file."""

    kind: int
    data: bytes

    @classmethod
    def of(cls, value: Any) -> GgufValue:
        """Encode a value: ints as uint32, floats as float32, lists as arrays."""
        match value:
            case bool():
                return cls(7, struct.pack("<?", value))
            case int():
                return cls(4, struct.pack("<I", value))
            case float():
                return cls(6, struct.pack("<f", value))
            case str():
                return cls(_STRING, _string(value.encode()))
            case _:
                entries = [cls.of(each) for each in value]
                head = struct.pack("<IQ", entries[0].kind if entries else 4, len(entries))
                return cls(_ARRAY, head + b"".join(entry.data for entry in entries))


@frozen
class GgufEntry:
    """Holds one line of a GGUF file's table of tensors."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


@frozen
class GgufContent:
    """Holds the parts of a GGUF file, which need not fit each other."""

    metadata: tuple[tuple[bytes, GgufValue], ...]
    table: tuple[GgufEntry, ...]
    data: bytes
    version: int = 3
    num_tensors: int | None = None
    num_values: int | None = None

    def encoded(self) -> bytes:
        """Return the file."""
        num_tensors = len(self.table) if self.num_tensors is None else self.num_tensors
        num_values = len(self.metadata) if self.num_values is None else self.num_values
        parts = [b"GGUF", struct.pack("<IQQ", self.version, num_tensors, num_values)]
        parts += [_string(key) + struct.pack("<I", value.kind) + value.data for key, value in self.metadata]
        for entry in self.table:
            dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape)
            parts.append(_string(entry.name) + dims + struct.pack("<IQ", entry.kind, entry.offset))
        head = b"".join(parts)
        return head + bytes(-len(head) % 32) + self.data


def mutated_gguf(rng: random.Random, content: GgufContent) -> bytes:
    """Return a GGUF file in which some values, types, counts, names, shapes or offsets are others."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = _changed_gguf(rng, content)
    data = content.encoded()
    return mutated_bytes(rng, data) if rng.random() < 0.15 else data


def _changed_gguf(rng: random.Random, content: GgufContent) -> GgufContent:
    match rng.randrange(10):
        case 0:
            return evolve(content, num_tensors=_count(rng, len(content.table)))
        case 1:
            return evolve(content, num_values=_count(rng, len(content.metadata)))
        case 2 | 3 | 4 | 5:
            metadata = list(content.metadata)
            place = rng.randrange(len(metadata))
            key, value = metadata[place]
            match rng.randrange(8):
                case 0:
                    del metadata[place]
                case 1:
                    metadata.append((mutated_bytes(rng, key), value))
                case 2:
                    metadata[place] = (key, metadata[rng.randrange(len(metadata))][1])
                case 3:
                    metadata[place] = (key, GgufValue(rng.choice((*_FORMATS, _STRING, _ARRAY, 13)), value.data))
                case 4:
                    metadata[place] = (key, GgufValue(value.kind, mutated_bytes(rng, value.data)))
                case _:
                    metadata[place] = (key, _value(rng))
            return evolve(content, metadata=tuple(metadata))
        case 6 | 7 | 8:
            table = list(content.table)
            place = rng.randrange(len(table))
            entry = table[place]
            match rng.randrange(6):
                case 0:
                    del table[place]
                case 1:
                    table.append(evolve(entry, name=mutated_bytes(rng, entry.name)))
                case 2:
                    table[place] = evolve(entry, kind=rng.choice((*range(32), 2**31)))
                case 3:
                    table[place] = evolve(entry, offset=rng.choice((0, 8, 31, entry.offset + 32, 2**40, 2**64 - 32)))
                case 4:
                    table[place] = evolve(entry, shape=rng.choice(table).shape)
                case _:
                    shape = [*entry.shape]
                    shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 31, 64, 2**20, 2**40, 2**63, 2**64 - 1))
                    table[place] = evolve(entry, shape=tuple(shape) if rng.random() < 0.8 else (*shape, 1))
            return evolve(content, table=tuple(table))
        case _:
            return evolve(
                content, version=rng.choice((1, 2, 3, 4)), data=content.data[: rng.randrange(len(content.data))]
            )


def _value(rng: random.Random) -> GgufValue:
    """Make a value of a random type."""
    kind = rng.choice((*_FORMATS, _STRING, _ARRAY))
    if kind == _STRING:
        return GgufValue.of(rng.choice(("", "a", "gpt2", "llama", "none", "yarn", "\0", "x" * 5000)))
    if kind == _ARRAY:
        inner = rng.choice((*_FORMATS, _STRING))
        count = rng.choice((0, 1, 2, 48, 500))
        entries = b"".join(_number(rng, inner) if inner != _STRING else _string(b"t%d" % i) for i in range(count))
        return GgufValue(_ARRAY, struct.pack("<IQ", inner, rng.choice((count, count, count + 1, 2**40))) + entries)
    return GgufValue(kind, _number(rng, kind))


def _number(rng: random.Random, kind: int) -> bytes:
    size = struct.calcsize(_FORMATS[kind])
    return rng.choice((bytes(size), b"\xff" * size, b"\x01" + bytes(size - 1), rng.randbytes(size)))


def _count(rng: random.Random, count: int) -> int:
    return rng.choice((0, max(0, count - 1), count + 1, 2**16, 2**32, 2**64 - 1))


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
