"""Have Ray Serve send each call to the replica that was chosen for it, and say which replicas there are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged_sdk.ray.watch import Watch

__all__ = ["DirectedCalls"]


MOST_LEAVING: Final = 64
"""So many replicas are remembered that Ray Serve is ending."""


class DirectedCalls(RequestRouter):
    """Sends calls where their ``target`` says, and others anywhere. Ray Serve makes one for each handle.

    The choice itself is made by :class:`paged_sdk.routing.Router`, before the call: it needs to know more of a request
    than a call says, and hears what becomes of it.
    """

    def initialize_state(self, **options: Any) -> None:
        self._watches: list[Watch] = []
        self._leaving: OrderedDict[str, RunningReplica] = OrderedDict()  # requests are under way there, maybe

    @property
    def supports_rejection_protocol(self) -> bool:
        """Tell Ray Serve not to ask a replica whether it has room: engines have queues of their own."""
        return False

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        for each in pending_request.args:
            if isinstance(each, Watch) and each not in self._watches:
                self._watches.append(each)
                self._tell()
        target: str = pending_request.kwargs.get("target", "")
        found = [each for each in candidate_replicas if each.replica_id.unique_id == target]
        if not found and target in self._leaving:
            found = [self._leaving[target]]
        # Any other says that it is not the target; to find none would keep the call waiting for ever.
        return [found or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        stay = {each.replica_id for each in replicas}
        for replica_id, replica in self.curr_replicas.items():
            if replica_id not in stay:
                self._leaving[replica_id.unique_id] = replica
                if len(self._leaving) > MOST_LEAVING:
                    self._leaving.popitem(last=False)
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._leaving.pop(replica_id.unique_id, None)
        self._tell()

    def _tell(self) -> None:
        names = frozenset(each.unique_id for each in self.curr_replicas)
        for watch in self._watches:
            watch.note(names)
