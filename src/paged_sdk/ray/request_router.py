"""Make Ray Serve send each call to a chosen replica, and report which replicas there are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged_sdk.ray.watch import Watch

__all__ = ["DirectedCalls"]


MOST_LEAVING: Final = 64
"""Most replicas to remember that Ray Serve is ending."""


class DirectedCalls(RequestRouter):
    """Sends calls to their ``target``, and other calls to any replica. Ray Serve constructs one router per handle.

    :class:`paged_sdk.routing.Router` makes the choice before the call, because it needs more of a request than a call
        contains, and tracks the request to its end.
    """

    def initialize_state(self, **options: Any) -> None:
        self._watches: list[Watch] = []
        self._leaving: OrderedDict[str, RunningReplica] = OrderedDict()  # ending, perhaps with running requests

    @property
    def supports_rejection_protocol(self) -> bool:
        """Return False, so that Ray Serve does not ask a replica whether it has room: engines have their own queues."""
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
        # Other replicas end the call at once, as they are not the target; without a candidate it would wait for ever.
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
