"""Serves models over HTTP with OpenAI's and Anthropic's APIs, as an ASGI application to run or mount::

    app = create_app(model)
    uvicorn.run(app)

``ServerSettings`` has its settings.
"""

from __future__ import annotations

from paged_sdk.server.app import ModelServer, create_app
from paged_sdk.server.json_lines import JsonLines, log_as_json
from paged_sdk.server.settings import ServerSettings

__all__ = ["JsonLines", "ModelServer", "ServerSettings", "create_app", "log_as_json"]
