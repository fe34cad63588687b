"""Say how many replicas there should be, where Ray Serve is to decide it."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

__all__ = ["replicas_for_texts"]


def replicas_for_texts(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the texts need that are under way or wait, of which each is to have
    ``target_ongoing_requests``; Ray Serve applies its bounds, factors and delays. It counts calls itself otherwise, of
    which there is one for each replica, whatever that does.
    """
    texts = (context.aggregated_metrics or {}).get("texts", {})
    return sum(texts.values()) / context.config.target_ongoing_requests, {}
