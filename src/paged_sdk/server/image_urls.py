"""Fetches images that requests refer to by URL, from allowed hosts, before a body is parsed."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
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
"""Maximum size of one image. A JPEG photograph of 48 megapixels has 12 MB."""
MAX_IMAGES: Final = 32
MAX_REDIRECTS: Final = 3
SECONDS: Final = 10.0
"""Time to fetch one image, with all lookups of hosts and all redirections."""
THREADS: Final = 8
PIECE: Final = 1 << 16
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All assigned global unicast addresses of IPv6."""


def _lower(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.lower() for name in names)


@frozen
class ImageUrls:
    """Replaces URLs of images by ``data:`` URLs. Without hosts, nothing is fetched; the SDK then refuses the URLs.

    :ivar hosts: allowed host names, with the port if it is not the scheme's default; ``*``: any host with a public
        address, so that clients cannot reach the server's own network
    :ivar max_bytes: maximum total size of one request's images
    """

    hosts: frozenset[str] = field(converter=_lower)
    max_bytes: int = 1 << 26
    # A limiter of its own, so that slow hosts do not take threads from other work.
    _threads: anyio.CapacityLimiter = field(init=False, factory=lambda: anyio.CapacityLimiter(THREADS))

    async def fill(self, body: object) -> object:
        """Fetch the images of a body's messages, and replace their URLs in the body.

        :raises InvalidRequestError: the URL's host is not allowed, or the image cannot be fetched
        """
        if not self.hosts:
            return body
        found = [(part, key) for part, key in _url_places(body) if part[key].startswith(("http://", "https://"))]
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
            try:
                url = urlsplit(address)
                connection = self._connect(url, deadline)
            except ValueError:
                raise InvalidRequestError.of("image_url", address, "an address of an image") from None
            timer = threading.Timer(_left(deadline), connection.cut)
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

    def _connect(self, url: SplitResult, deadline: float) -> _Connection:
        """Return a connection to a URL's host, which connects when it is used.

        :raises InvalidRequestError: the host is not allowed, or does not resolve before the deadline
        """
        host = url.hostname or ""
        port = 443 if url.scheme == "https" else 80
        name = host if url.port in (None, port) else f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"
        is_any = "*" in self.hosts and name == host
        if url.scheme not in ("http", "https") or (name not in self.hosts and not is_any):
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that this server fetches images from")
        try:
            found = _resolve(host, url.port or port, _left(deadline))
        except TimeoutError:
            allowed = f"a host whose address is found within {SECONDS:g} s"
            raise InvalidRequestError.of("image_url", url.geturl(), allowed) from None
        except OSError:
            raise InvalidRequestError.of("image_url", url.geturl(), "a host that exists") from None
        if name not in self.hosts:
            found = [address for address in found if is_public(address)]
        if not found:
            raise InvalidRequestError.of("image_url", url.geturl(), "a host with a public address")
        return _Connection(host, url.port or port, found, deadline, is_secure=url.scheme == "https")


def is_public(address: str) -> bool:
    """Tell whether an IP address is public. An IPv6 address that embeds an IPv4 address is judged by the latter."""
    judged = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(judged, ipaddress.IPv6Address):
        inner = judged.ipv4_mapped or judged.sixtofour
        if inner is None and judged in NAT64:
            inner = ipaddress.IPv4Address(int(judged) & 0xFFFFFFFF)
        if inner is None and judged not in UNICAST:
            return False
        judged = inner or judged
    return judged.is_global and not judged.is_multicast


def _left(deadline: float) -> float:
    """Return the seconds until a deadline; at least a millisecond, because a timeout of 0 means not to wait at all."""
    return max(deadline - time.monotonic(), 0.001)


def _resolve(host: str, port: int, seconds: float) -> list[str]:
    """Return the IP addresses of a host.

    The system's lookup has no timeout, so it gets a thread of its own, which is left to itself if it takes too long.

    :raises TimeoutError: the lookup takes longer than ``seconds``
    :raises OSError: there is no such host
    """
    lookup: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            lookup.set_result([str(address[0]) for *_, address in found])
        except Exception as error:  # raised by result()
            lookup.set_exception(error)

    threading.Thread(target=look_up, name="paged_sdk image host lookup", daemon=True).start()
    return lookup.result(seconds)


class _Connection(http.client.HTTPConnection):
    """Connects to the first reachable one of the IP addresses that were checked: a second lookup of the name could
    return others.
    """

    def __init__(self, host: str, port: int, addresses: Sequence[str], deadline: float, *, is_secure: bool) -> None:
        super().__init__(host, port)
        self._addresses = addresses
        self._deadline = deadline
        self._is_secure = is_secure
        self._is_cut = False
        self._held: socket.socket | None = None

    def connect(self) -> None:
        self._held = self.sock = self._reach()
        self.sock.settimeout(_left(self._deadline))
        if self._is_cut:  # before there was a socket to shut down
            raise TimeoutError
        if self._is_secure:
            secure = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._held = self.sock = secure
            secure.do_handshake()

    def _reach(self) -> socket.socket:
        """Connect to one of the addresses. Each gets an equal share of the time that is left.

        :raises OSError: none can be reached
        """
        failure: OSError | None = None
        for place, address in enumerate(self._addresses):
            seconds = _left(self._deadline) / (len(self._addresses) - place)
            try:
                return socket.create_connection((address, self.port), seconds)
            except OSError as error:
                failure = error
        assert failure is not None, "there is at least one address"
        raise failure

    def cut(self) -> None:
        """Shut the socket down, which ends another thread's wait on it. The socket's own timeout restarts with every
        byte, so a slow host could hold the thread for hours.
        """
        self._is_cut = True
        if self._held is not None:
            with suppress(OSError):  # already closed
                socket.socket.shutdown(self._held, socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse, address: str, limit: int, deadline: float) -> bytes:
    pieces, length = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise InvalidRequestError.of("image_url", address, f"an image of at most {limit} bytes")
    if time.monotonic() > deadline:  # the timer has cut the connection, so the data may be incomplete
        raise InvalidRequestError.of("image_url", address, f"an image that comes within {SECONDS:g} s")
    return b"".join(pieces)


def _url_places(body: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Return the places of images' URLs in a body of any API, as a mapping and a key of it."""
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
