"""Exports metrics of the server and its models to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_sdk import Model, ModelStats, Usage
from paged_sdk.server.drain import Drain
from paged_sdk.server.served_models import ServedModels, is_running

__all__ = ["Metrics"]

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

GAUGES: Final[Mapping[str, str]] = {
    "running": "Sequences that are computed.",
    "waiting": "Sequences in the queue.",
    "awaiting_images": "Sequences whose images are being encoded.",
    "blocks_total": "Blocks of the KV pool.",
    "blocks_used": "Blocks that live sequences hold.",
    "blocks_cached": "Blocks that are free to take and hold a prefix.",
    "blocks_pinned": "Blocks that pinned prefixes hold.",
    "blocks_free": "Blocks that are free and empty.",
    "prompt_tok_per_sec": "Prompt tokens per second over the last ten seconds of work.",
    "completion_tok_per_sec": "Generated tokens per second over the last ten seconds of work.",
    "draft_speed_up": "How many times as long texts would have taken without drafts.",
}
COUNTERS: Final[Mapping[str, str]] = {
    "prompt_tokens": "Prompt tokens computed.",
    "completion_tokens": "Tokens generated.",
    "prefix_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_hits": "Prompt tokens found in the prefix cache.",
    "prefix_restored": "Tokens whose KV was read back from the prefix cache's directory.",
    "preemptions": "Sequences whose KV was given up for others.",
    "steps": "Steps of the engine.",
    "drafted_tokens": "Drafts that were verified.",
    "accepted_tokens": "Drafts that were right.",
    "forced_tokens": "Generated tokens that were the only ones a constraint allowed.",
}
"""The exported fields of ``Model.stats()``, gauges and counters, with their descriptions."""


class Metrics:
    """Counts requests, and exports the counts together with the models' statistics."""

    def __init__(self, models: ServedModels, drain: Drain) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ModelFigures(models))
        Gauge("paged_sdk_http_requests_in_flight", "Requests under way.", registry=self._registry).set_function(
            lambda: drain.in_flight
        )
        self._requests = Counter(
            "paged_sdk_http_requests", "Requests that were answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "paged_sdk_http_request_seconds",
            "Time until the end of an answer.",
            ("path",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._first_token = self._of_model("time_to_first_token_seconds", "From a request to its first token.")
        self._queue = self._of_model("queue_seconds", "From a request to its first step.")

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request.

        :param path: path of the matching route; empty: none matched
        """
        self._requests.labels(path or "other", str(status)).inc()
        self._seconds.labels(path or "other").observe(seconds)

    def note_answer(self, model: str, usage: Usage) -> None:
        """Record an answer's latencies."""
        if usage.completion_tokens:
            self._first_token.labels(model).observe(usage.time_to_first_token_sec)
            self._queue.labels(model).observe(usage.queue_time_sec)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _of_model(self, name: str, description: str) -> Histogram:
        return Histogram(f"paged_sdk_{name}", description, ("model",), buckets=SECONDS, registry=self._registry)


class _ModelFigures(Collector):
    """Reads the models' statistics when Prometheus scrapes."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._numbers: dict[str, _Numbers] = {}

    def collect(self) -> Iterable[Metric]:
        stats = {name: model.stats() for name, model in self._models.all.items()}
        for field, description in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"paged_sdk_{field}", description, labels=["model"]), field, stats)
        for field, description in COUNTERS.items():
            yield _filled(CounterMetricFamily(f"paged_sdk_{field}", description, labels=["model"]), field, stats)
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterable[Metric]:
        """Return the same metrics per replica, and whether it runs, for models with several replicas."""
        replicas = {
            (name, str(number)): replica
            for name, model in self._models.all.items()
            for number, replica in self._numbers.setdefault(name, _Numbers()).of(model.replicas).items()
        }
        if not replicas:
            return
        labels = ["model", "replica"]
        up = GaugeMetricFamily("paged_sdk_replica_up", "1: the replica runs; 0: it has died or hung.", labels=labels)
        for of, replica in replicas.items():
            up.add_metric(of, float(is_running(replica)))
        yield up
        for kind, named in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for field, description in named.items():
                family = kind(f"paged_sdk_replica_{field}", f"Of each replica: {description}", labels=labels)
                for of, replica in replicas.items():
                    family.add_metric(of, getattr(replica.stats(), field))
                yield family


class _Numbers:
    """Numbers the replicas of a model. A number is never reused: with its index as label, a replica would continue the
    counters of one that is gone.
    """

    def __init__(self) -> None:
        self._given: WeakKeyDictionary[Model, int] = WeakKeyDictionary()
        self._next = 0

    def of(self, replicas: Sequence[Model]) -> dict[int, Model]:
        """Return replicas by their numbers; empty for a model that never had more than one."""
        for each in replicas:
            if each not in self._given:
                self._given[each] = self._next
                self._next += 1
        return {self._given[each]: each for each in replicas} if self._next > 1 else {}


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, field: str, stats: Mapping[str, ModelStats]
) -> GaugeMetricFamily | CounterMetricFamily:
    for name, each in stats.items():
        family.add_metric([name], getattr(each, field))
    return family
