"""Fetch images that requests name by address, from hosts that the operator allows, before a body is read."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Iterator
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


@frozen
class ImageUrls:
    """Puts images in the place of their addresses. Without hosts nothing is fetched, and addresses are refused later.

    :ivar hosts: names of hosts; ``*``: any whose addresses are public, so that nobody reaches the server's own network
        through it
    """

    hosts: Collection[str]
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
        for part, key in found:
            data = await anyio.to_thread.run_sync(self._fetch, part[key], abandon_on_cancel=True, limiter=self._threads)
            part[key] = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
        return body

    def _fetch(self, address: str) -> bytes:
        deadline = time.monotonic() + SECONDS
        for _ in range(MAX_REDIRECTS + 1):
            try:
                url = urlsplit(address)
                connection = self._connect(url)
            except ValueError:
                raise InvalidRequestError.of("image_url", address, "an address of an image") from None
            try:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", path, headers={"Accept": "image/*"})
                with connection.getresponse() as answer:
                    if answer.status == 200:
                        return _read(answer, address, deadline)
                    if answer.status not in (301, 302, 303, 307, 308):
                        raise InvalidRequestError.of("image_url", address, f"an image, not status {answer.status}")
                    address = urljoin(address, answer.getheader("location", ""))
            except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
                raise InvalidRequestError(
                    f"the image at {address[:100]} cannot be fetched: {type(error).__name__}", field="image_url"
                ) from error
            finally:
                connection.close()
        raise InvalidRequestError.of("image_url", address, f"at most {MAX_REDIRECTS} redirections")

    def _connect(self, url: SplitResult) -> _Connection:
        """Return a connection to a host that is allowed.

        :raises InvalidRequestError: it is not, or there is none
        """
        host = url.hostname or ""
        port = url.port or (443 if url.scheme == "https" else 80)
        if url.scheme not in ("http", "https") or (host not in self.hosts and "*" not in self.hosts):
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that this server fetches images from")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that there is") from None
        address = str(found[0][4][0])
        if host not in self.hosts and not ipaddress.ip_address(address.partition("%")[0]).is_global:
            raise InvalidRequestError.of("image_url", url.geturl(), "a host with a public address")
        return _Connection(host, port, address, is_secure=url.scheme == "https")


class _Connection(http.client.HTTPConnection):
    """Is a connection to the address that was judged: asked again, the name might stand for another."""

    def __init__(self, host: str, port: int, address: str, *, is_secure: bool) -> None:
        super().__init__(host, port, timeout=SECONDS)
        self._address = address
        self._is_secure = is_secure

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _read(answer: http.client.HTTPResponse, address: str, deadline: float) -> bytes:
    pieces, length = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BYTES:
            raise InvalidRequestError.of("image_url", address, f"an image of at most {MAX_BYTES} bytes")
        if time.monotonic() > deadline:
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
