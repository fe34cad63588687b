"""Serve models over HTTP, as OpenAI's API has it: an application to mount or to run.

app = create_app(model)
uvicorn.run(app)
"""

from __future__ import annotations

from paged_sdk.server.app import ModelServer, create_app
from paged_sdk.server.settings import ServerSettings

__all__ = ["ModelServer", "ServerSettings", "create_app"]
