"""Serves the chat page: static files, which need no build step."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from attrs import field, frozen
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["PAGE_PATHS", "PAGE_ROUTES", "ChatPage"]

FOLDER: Final = Path(__file__).parent / "page"
TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
PAGE_ROUTES: Final = ("/", "/page/{name}")
PAGE_PATHS: Final = ("/", *(f"/page/{path.name}" for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES))
"""Served without an API key: a browser loads them before its user can enter one. They say nothing about the models."""

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""A second line of defence: even if the page had a bug, a model's output could not run as a script, and nothing could
be sent to other servers.
"""

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@frozen
class ChatPage:
    """Serves the page's files, which are read once."""

    _files: Mapping[str, bytes] = field(init=False)

    @_files.default
    def _read(self) -> Mapping[str, bytes]:
        return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}

    async def answer(self, request: Request) -> Response:
        """Return a file, or 304 if the browser has it.

        :raises HTTPException: there is no such file
        """
        name = request.path_params.get("name", "index.html")
        data = self._files.get(name)
        if data is None:
            raise HTTPException(404)
        tag = f'"{sha256(data).hexdigest()[:32]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=TYPES[Path(name).suffix], headers=headers)
