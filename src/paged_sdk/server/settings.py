"""Defines the server's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen

from paged_sdk import ConfigError, InvalidRequestError
from paged_sdk.wire.body import BodyReader
from paged_sdk.wire.sampling import SamplingDefaults, SamplingFields, read_sampling

__all__ = ["ServerSettings"]

T = TypeVar("T")

SAMPLING: Final = BodyReader(SamplingDefaults)
MAX_BODY_BYTES = 64 << 20
"""Default limit: a dozen photographs as data URLs, or a text of ten million tokens."""


def _texts(value: Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _fixed(value: object) -> object:
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


def _are_texts(instance: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for text in value:
        if not isinstance(text, str) or not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError.of(
                attribute.name, "..." if attribute.name == "api_keys" else text, "printable ASCII without spaces"
            )


def _are_origins(instance: object, attribute: Attribute[Any], value: tuple[str, ...]) -> None:
    for text in value:
        if text not in ("*", "null") and text != _origin(text):
            allowed = "an origin as browsers say it: https://example.org or http://127.0.0.1:8080, without a path, or *"
            raise ConfigError.of(attribute.name, text, allowed)


def _origin(address: str) -> str:
    """Return the origin of an address as browsers write it; empty if it has none."""
    try:
        parts = urlsplit(address)
        port, host = parts.port, parts.hostname
    except ValueError:
        return ""
    if not parts.scheme or not host:
        return ""
    host = f"[{host}]" if ":" in host else host
    is_usual = port is None or (parts.scheme, port) in (("http", 80), ("https", 443))
    return f"{parts.scheme}://{host}" if is_usual else f"{parts.scheme}://{host}:{port}"


def _is_count(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError.of(attribute.name, value, "an int >= 1")


def _is_time(instance: object, attribute: Attribute[Any], value: object) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not fits and not (value is None and attribute.name == "timeout"):
        raise ConfigError.of(attribute.name, value, "a finite number of seconds > 0")


@frozen(kw_only=True)
class ServerSettings:
    """Holds the settings of a server.

    :ivar api_keys: clients have to send one of them as ``Authorization: Bearer ...`` or ``x-api-key``; none: no key is
        needed
    :ivar cors_origins: origins whose web pages may call the server, such as ``https://example.org``; ``*``: all
    :ivar allowed_hosts: host names by which clients may call the server; none: any. This keeps web pages from reaching
        a server on their user's machine by a name of their own (DNS rebinding)
    :ivar max_body_bytes: maximum size of a body; larger ones get a 413
    :ivar timeout: maximum seconds per answer, queueing included; None: no limit
    :ivar keep_alive: seconds without an event after which a stream gets a comment, so that no proxy closes it
    :ivar drain_timeout: seconds for running requests to finish on shutdown
    :ivar image_hosts: hosts that images in requests may be fetched from, with a non-default port
        (``images.example:8080``); ``*``: any with a public address; none: images have to be ``data:`` URLs. A request's
        images may have ``max_body_bytes`` together
    :ivar adapter_folder: the directory that clients may load adapters from; None: they may load none
    :ivar page: whether there is a chat page at ``/``
    :ivar sampling: defaults for requests that leave a field unset, by the API's names: ``temperature``, ``top_p``,
        ``top_k``, ``min_p``, ``frequency_penalty``, ``presence_penalty``, ``repetition_penalty``, ``stop``, ``seed``;
        the others come from the checkpoint. An API without such a field ignores it
    :raises ConfigError: at construction
    """

    api_keys: tuple[str, ...] = field(default=(), converter=_texts, validator=_are_texts, repr=False)
    cors_origins: tuple[str, ...] = field(default=(), converter=_texts, validator=[_are_texts, _are_origins])
    allowed_hosts: tuple[str, ...] = field(default=(), converter=_texts, validator=_are_texts)
    max_body_bytes: int = field(default=MAX_BODY_BYTES, validator=_is_count)
    timeout: float | None = field(default=None, validator=_is_time)
    keep_alive: float = field(default=15.0, validator=_is_time)
    drain_timeout: float = field(default=60.0, validator=_is_time)
    image_hosts: tuple[str, ...] = field(default=(), converter=_texts, validator=_are_texts)
    adapter_folder: Path | None = field(default=None)
    page: bool = field(default=True)
    sampling: Mapping[str, Any] = field(factory=dict, converter=_fixed, hash=False)

    @adapter_folder.validator
    def _is_folder(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not (isinstance(value, Path) and value.is_dir()):
            raise ConfigError.of("adapter_folder", value, "a Path of a directory that exists")

    @page.validator
    def _is_switch(self, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError.of("page", value, "True or False")

    @sampling.validator
    def _can_sample(self, attribute: Attribute[Any], value: object) -> None:
        try:
            read_sampling(cast(SamplingFields, SAMPLING.read(value)), max_len=None, top_n=None)
        except InvalidRequestError as error:
            field_name = "sampling" if error.field in (None, "body") else f"sampling.{error.field}"
            raise ConfigError.of(field_name, error.value, error.allowed) from None

    def reader(self, body: BodyReader[Any], read: Callable[[object], T]) -> Callable[[object], T]:
        """Wrap a parser of bodies so that sampling fields that a body leaves unset get the server's defaults.

        :param body: describes the fields that the API has
        :param read: parses a body
        """
        known = {name: value for name, value in self.sampling.items() if name in body.names and value is not None}

        def filled(value: object) -> T:
            if isinstance(value, Mapping):
                value = {**value, **{name: said for name, said in known.items() if value.get(name) is None}}
            return read(value)

        return filled if known else read
