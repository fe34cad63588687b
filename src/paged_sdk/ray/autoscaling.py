"""Compute how many replicas there should be, for Ray Serve's autoscaling."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

__all__ = ["replicas_for_sequences"]


def replicas_for_sequences(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the running and waiting sequences need, at ``target_ongoing_requests`` sequences each.
    Ray Serve applies its bounds, factors and delays.

    By default Ray Serve counts calls, which does not work here: each client makes one long call per replica, whatever
    its load.
    """
    sequences = (context.aggregated_metrics or {}).get("texts", {})
    return sum(sequences.values()) / context.config.target_ongoing_requests, {}
