"""Serialize messages. Objects that both sides have, such as the model's tokenizer, are sent by name only."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

from attrs import fields

from paged_sdk.calls.preparation import RequestPreparer
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.token_healing import TokenPrefixes
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.constraints.grammar import Grammar
from paged_sdk.errors import InvalidRequestError
from paged_sdk.remote.link import Parcel
from paged_sdk.scheduler.request import Request
from paged_sdk.types.tool import Tool

__all__ = [
    "ProcessorCache",
    "pack",
    "pack_preparer",
    "pack_processors",
    "pack_request",
    "unpack",
    "unpack_preparer",
    "unpack_request",
]

_T = TypeVar("_T")

_LARGE: Final = 1 << 14
"""Arrays of at least this size in bytes are sent beside the message, without copying: 16 KiB take a microsecond."""
_MOST_PROCESSORS: Final = 64
_TOKENIZER, _PREFIXES = "tokenizer", "prefixes"


def pack(value: object) -> Parcel:
    """Serialize a message without shared objects."""
    return [pickle.dumps(value, protocol=5)]


def unpack(parcel: Parcel) -> Any:
    """Deserialize the first part of a parcel."""
    return pickle.loads(parcel[0])


def pack_request(request: Request) -> Parcel:
    """Serialize a request as parts of a parcel. Shared objects are sent by name; the grammar is left out, as the
    engine's process compiles it.

    :raises InvalidRequestError: a part of the request cannot be pickled
    """
    return _dumped(request, _OF_REQUESTS, "request")


def unpack_request(parts: Parcel, preparer: RequestPreparer) -> Request:
    """Deserialize a request.

    :param preparer: has the shared objects
    """

    def shared(name: str) -> object:
        return preparer.text.tokenizer if name == _TOKENIZER else preparer.prefixes

    request: Request = _Unpickler(parts, shared).load()
    return request


def pack_preparer(preparer: RequestPreparer) -> Parcel:
    """Serialize what prepares requests: tokenizer, chat template, limits, image processing."""
    return _dumped(preparer, _OF_PREPARERS, "model")


def unpack_preparer(parts: Parcel) -> RequestPreparer:
    """Deserialize what prepares requests."""
    preparer: RequestPreparer = _Unpickler(parts, _nothing_shared).load()
    return preparer


def pack_processors(processors: Sequence[object]) -> tuple[bytes, ...]:
    """Pickle logits processors.

    :raises InvalidRequestError: a processor cannot be pickled, or not imported by another process
    """
    return tuple(map(_pack_processor, processors))


def _pack_processor(processor: Any) -> bytes:
    allowed = "a function or object that another process can import: of a module, not of __main__ or of a function"
    try:
        data = pickle.dumps(processor)
    except Exception as error:  # of any kind, from methods of the application's class
        raise InvalidRequestError.of("logits_processors", processor, allowed) from error
    if "__main__" in (getattr(processor, "__module__", None), type(processor).__module__):
        raise InvalidRequestError.of("logits_processors", processor, allowed)
    return data


class ProcessorCache:
    """Unpickles logits processors. Equal bytes give the same object, so that the rows of its requests are processed
    together. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, object] = OrderedDict()

    def get(self, data: bytes) -> Any:
        """Return a processor.

        :raises InvalidRequestError: it cannot be unpickled in this process
        """
        if data not in self._kept:
            try:
                self._kept[data] = pickle.loads(data)
            except Exception as error:  # of any kind, such as a module that is not there
                raise InvalidRequestError(
                    f"a logits processor cannot be made in the process of the engine: {error!r}",
                    field="logits_processors",
                ) from error
        self._kept.move_to_end(data)
        if len(self._kept) > _MOST_PROCESSORS:
            self._kept.popitem(last=False)
        return self._kept[data]


def _dumped(value: object, table: Mapping[type, Callable[[Any], Any]], field: str) -> Parcel:
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < _LARGE:
                return True
        large.append(buffer.raw())
        return False

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=is_small)
    pickler.dispatch_table = {**copyreg.dispatch_table, **table}
    try:
        pickler.dump(value)
    except Exception as error:  # of any kind, from methods of the application's objects
        raise InvalidRequestError(f"the {field} cannot be sent to another process: {error}", field=field) from error
    return [stream.getbuffer(), *large]


class _Unpickler(pickle.Unpickler):
    """Reads the parts that :func:`_dumped` returns.

    :param shared: returns this side's shared object, by name
    """

    def __init__(self, parts: Parcel, shared: Callable[[str], object]) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=parts[1:])
        self._shared = shared

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _of_this_side.__name__:
            return self._shared
        return super().find_class(module, name)


def _of_this_side(name: str) -> object:
    raise AssertionError("an _Unpickler replaces it")


def _nothing_shared(name: str) -> object:
    raise AssertionError(f"the message names {name}, which it should hold")


def _made(cls: Callable[..., _T], values: Mapping[str, Any]) -> _T:
    return cls(**values)


def _frozen(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _empty(cls: type[_T]) -> _T:
    return cls.__new__(cls)


def _by_fields(value: Any) -> tuple[Any, ...]:
    """Reduce a value to the arguments of its constructor."""
    return _made, (type(value), {each.alias: getattr(value, each.name) for each in fields(type(value)) if each.init})


def _without_function(tool: Tool) -> tuple[Any, ...]:
    """Reduce a tool to its description; its function is called on the sender's side."""
    state = {each.name: getattr(tool, each.name) for each in fields(Tool)}
    return _empty, (Tool,), {**state, "function": None}


def _tokenizer(tokenizer: Tokenizer) -> tuple[Any, ...]:
    return Tokenizer.from_json, (tokenizer.to_json(), tokenizer.special)


def _template(template: ChatTemplate) -> tuple[Any, ...]:
    return _made, (ChatTemplate, template.arguments)


def _frozen_mapping(mapping: MappingProxyType[Any, Any]) -> tuple[Any, ...]:
    return _frozen, (dict(mapping),)


_OF_REQUESTS: Final[Mapping[type, Callable[[Any], Any]]] = MappingProxyType(
    {
        Tokenizer: lambda _: (_of_this_side, (_TOKENIZER,)),
        TokenPrefixes: lambda _: (_of_this_side, (_PREFIXES,)),
        Grammar: lambda _: (type(None), ()),
        Tool: _without_function,
        MappingProxyType: _frozen_mapping,
    }
)
_OF_PREPARERS: Final[Mapping[type, Callable[[Any], Any]]] = MappingProxyType(
    {
        RequestPreparer: _by_fields,
        TextProcessor: _by_fields,
        Tokenizer: _tokenizer,
        ChatTemplate: _template,
        MappingProxyType: _frozen_mapping,
    }
)
