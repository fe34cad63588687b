"""Run replicas of a model under Ray Serve.

async with RayReplicas(builder, num_replicas=4) as model:
    response = await model.send_chat_request(messages)
"""

from __future__ import annotations

from paged_sdk.ray.app import serve_app
from paged_sdk.ray.replicas import RayReplicas

__all__ = ["RayReplicas", "serve_app"]
