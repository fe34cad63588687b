from collections.abc import Mapping

from .request_router import ReplicaID

class AutoscalingConfig:
    target_ongoing_requests: float

class AutoscalingContext:
    config: AutoscalingConfig
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[ReplicaID, float]] | None: ...

class RequestRouterConfig:
    def __init__(self, *, request_router_class: str) -> None: ...
