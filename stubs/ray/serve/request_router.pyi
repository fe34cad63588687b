from collections.abc import Mapping
from typing import Any

class ReplicaID:
    unique_id: str

class RunningReplica:
    @property
    def replica_id(self) -> ReplicaID: ...

class PendingRequest:
    args: list[Any]
    kwargs: dict[str, Any]

class RequestRouter:
    @property
    def curr_replicas(self) -> Mapping[ReplicaID, RunningReplica]: ...
    def initialize_state(self, **kwargs: Any) -> None: ...
    def update_replicas(self, replicas: list[RunningReplica]) -> None: ...
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None: ...
