"""Fetch images that requests name by address, from hosts that the operator allows, before a body is read."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import anyio.to_thread
from attrs import field, frozen

from paged_sdk import InvalidRequestError

__all__ = ["ImageUrls"]

MAX_BYTES: Final = 20 << 20
"""A photograph of 48 megapixels has 12 MB as JPEG."""
MAX_IMAGES: Final = 32
MAX_REDIRECTS: Final = 3
SECONDS: Final = 10.0
THREADS: Final = 8
PIECE: Final = 1 << 16
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All that is assigned for hosts to be called by."""


def _lower(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.lower() for name in names)


@frozen
class ImageUrls:
    """Puts images in the place of their addresses. Without hosts nothing is fetched, and addresses are refused later.

    :ivar hosts: names of hosts, with a port if it is not that of HTTP or HTTPS; ``*``: any whose addresses are public,
        so that nobody reaches the server's own network through it
    :ivar max_bytes: what the images of one request may have together
    """

    hosts: frozenset[str] = field(converter=_lower)
    max_bytes: int = 1 << 26
    # Of their own: those that the SDK makes tokens in would else wait for strangers' hosts.
    _threads: anyio.CapacityLimiter = field(init=False, factory=lambda: anyio.CapacityLimiter(THREADS))

    async def fill(self, body: object) -> object:
        """Fetch the images of a body's messages, and write them as ``data:`` URLs where their addresses are.

        :raises InvalidRequestError: an address that is not allowed, or has no image
        """
        if not self.hosts:
            return body
        found = [(part, key) for part, key in _addresses(body) if part[key].startswith(("http://", "https://"))]
        if len(found) > MAX_IMAGES:
            raise InvalidRequestError.of("image_url", f"{len(found)} images", f"at most {MAX_IMAGES} to fetch")
        left = self.max_bytes
        for part, key in found:
            fetch = partial(self._fetch, part[key], min(left, MAX_BYTES))
            data = await anyio.to_thread.run_sync(fetch, abandon_on_cancel=True, limiter=self._threads)
            left -= len(data)
            part[key] = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
        return body

    def _fetch(self, address: str, limit: int) -> bytes:
        deadline = time.monotonic() + SECONDS
        for _ in range(MAX_REDIRECTS + 1):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                url = urlsplit(address)
                connection = self._connect(url, left)
            except ValueError:
                raise InvalidRequestError.of("image_url", address, "an address of an image") from None
            timer = threading.Timer(left, connection.cut)
            timer.start()
            try:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", path, headers={"Accept": "image/*"})
                with connection.getresponse() as answer:
                    if answer.status == 200:
                        return _read(answer, address, limit, deadline)
                    if answer.status not in (301, 302, 303, 307, 308):
                        raise InvalidRequestError.of("image_url", address, f"an image, not status {answer.status}")
                    address = urljoin(address, answer.getheader("location", ""))
            except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
                raise InvalidRequestError(
                    f"the image at {address[:100]} cannot be fetched: {type(error).__name__}", field="image_url"
                ) from error
            finally:
                timer.cancel()
                connection.close()
        raise InvalidRequestError.of("image_url", address, f"at most {MAX_REDIRECTS} redirections")

    def _connect(self, url: SplitResult, seconds: float) -> _Connection:
        """Return a connection to a host that is allowed.

        :raises InvalidRequestError: it is not, or there is none
        """
        host = url.hostname or ""
        port = 443 if url.scheme == "https" else 80
        name = host if url.port in (None, port) else f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"
        is_any = "*" in self.hosts and name == host
        if url.scheme not in ("http", "https") or (name not in self.hosts and not is_any):
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that this server fetches images from")
        try:
            found = socket.getaddrinfo(host, url.port or port, type=socket.SOCK_STREAM)
        except OSError:
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that there is") from None
        address = str(found[0][4][0])
        if name not in self.hosts and not is_public(address):
            raise InvalidRequestError.of("image_url", url.geturl(), "a host with a public address")
        return _Connection(host, url.port or port, address, seconds, is_secure=url.scheme == "https")


def is_public(address: str) -> bool:
    """Tell whether an address is one that anybody can reach; what stands for one of IPv4 is judged as that."""
    judged = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(judged, ipaddress.IPv6Address):
        inner = judged.ipv4_mapped or judged.sixtofour
        if inner is None and judged in NAT64:
            inner = ipaddress.IPv4Address(int(judged) & 0xFFFFFFFF)
        if inner is None and judged not in UNICAST:
            return False
        judged = inner or judged
    return judged.is_global and not judged.is_multicast


class _Connection(http.client.HTTPConnection):
    """Is a connection to the address that was judged: asked again, the name might stand for another."""

    def __init__(self, host: str, port: int, address: str, seconds: float, *, is_secure: bool) -> None:
        super().__init__(host, port, timeout=seconds)
        self._address = address
        self._is_secure = is_secure
        self._held: socket.socket | None = None

    def connect(self) -> None:
        self._held = self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_secure:
            secure = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._held = self.sock = secure
            secure.do_handshake()

    def cut(self) -> None:
        """End whatever another thread waits for: a host that sends a byte now and then would else keep it for hours."""
        if self._held is not None:
            with suppress(OSError):  # it has ended
                socket.socket.shutdown(self._held, socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse, address: str, limit: int, deadline: float) -> bytes:
    pieces, length = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise InvalidRequestError.of("image_url", address, f"an image of at most {limit} bytes")
    if time.monotonic() > deadline:  # it was cut
        raise InvalidRequestError.of("image_url", address, f"an image that comes within {SECONDS:g} s")
    return b"".join(pieces)


def _addresses(body: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Return where in the messages of a body, of any API, images' addresses are: the mapping, and the key."""
    given = body if isinstance(body, dict) else {}
    for message in [*_list(given.get("messages")), *_list(given.get("input"))]:
        for part in _list(message.get("content")) if isinstance(message, dict) else ():
            match part:
                case {"type": "image_url", "image_url": {"url": str()}}:
                    yield part["image_url"], "url"
                case {"type": "image", "source": {"url": str()}}:
                    yield part["source"], "url"
                case {"type": "input_image", "image_url": str()}:
                    yield part, "image_url"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
