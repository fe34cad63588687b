"""Collect the figures of a run by round, and compute medians and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from attrs import field, frozen

from benchmarks.environments import OWN
from benchmarks.tasks import Figures, Metric

__all__ = ["Ratio", "Results", "as_text"]


def as_text(figure: float) -> str:
    """Format a figure with four significant digits, or as an integer if that has more."""
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


@frozen
class Ratio:
    """Compares this project with the best peer; above 1, this project is better, whether lower or higher is better."""

    peer: str
    value: float


@frozen
class Results:
    """Holds the figures of a run's engines.

    :ivar metrics: the metrics, in the order of the table
    :ivar engines: the engines' versions by name
    :ivar values: one figure per round, by engine and metric
    :ivar reasons: why a figure is missing, by engine and metric
    """

    metrics: Sequence[Metric]
    engines: dict[str, str] = field(factory=dict)
    values: dict[str, dict[str, list[float]]] = field(factory=dict)
    reasons: dict[str, dict[str, str]] = field(factory=dict)

    def add(self, engine: str, figures: Figures) -> None:
        """Add a round's figures."""
        for key, value in figures.items():
            self.values.setdefault(engine, {}).setdefault(key, []).append(value)

    def add_reason(self, engine: str, metrics: Sequence[Metric], reason: str) -> None:
        """Record why a task gave no figures."""
        for metric in metrics:
            self.reasons.setdefault(engine, {})[metric.key] = reason

    def median(self, engine: str, metric: Metric) -> float | None:
        """Return the median over the rounds; None without a figure."""
        values = self.values.get(engine, {}).get(metric.key)
        return median(values) if values else None

    def ratio(self, metric: Metric) -> Ratio | None:
        """Return the ratio to the best peer; None if this project or every peer has no figure."""
        own = self.median(OWN, metric)
        peers = {
            engine: value
            for engine in self.engines
            if not engine.startswith(OWN) and (value := self.median(engine, metric)) is not None
        }
        if own is None or not peers:
            return None
        best = (max if metric.higher_is_better else min)(peers, key=peers.__getitem__)
        return Ratio(best, own / peers[best] if metric.higher_is_better else peers[best] / own)

    def as_json(self) -> dict[str, Any]:
        """Return everything, by metric."""
        return {"engines": self.engines, "metrics": [self._metric_as_json(metric) for metric in self.metrics]}

    def _metric_as_json(self, metric: Metric) -> dict[str, Any]:
        ratio = self.ratio(metric)
        return {
            "key": metric.key,
            "title": metric.title,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "median": {engine: self.median(engine, metric) for engine in self.engines},
            "rounds": {engine: self.values.get(engine, {}).get(metric.key, []) for engine in self.engines},
            "reasons": {
                engine: reasons[metric.key]
                for engine, reasons in self.reasons.items()
                if metric.key in reasons and self.median(engine, metric) is None
            },
            "ratio": None if ratio is None else {"best_peer": ratio.peer, "value": ratio.value},
        }
