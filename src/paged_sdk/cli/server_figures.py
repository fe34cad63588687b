"""Parses a server's metrics from Prometheus's text format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import asdict, fields, frozen

__all__ = ["ModelFigures", "ServerFigures"]

PREFIX: Final = "paged_sdk_"
SAMPLE: Final = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)")
LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED: Final = re.compile(r"\\(.)")


@frozen(kw_only=True)
class ModelFigures:
    """Holds the metrics of one model; fields have the names of :class:`~paged_sdk.ModelStats`.

    :ivar completion_tok_per_sec: over the last ten seconds of work; 0 while no sequence runs
    :ivar prompt_tok_per_sec: likewise
    :ivar first_token_seconds: mean time from a request to its first token; None: nothing was generated yet
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_pinned: int
    prompt_tokens: int
    completion_tokens: int
    prompt_tok_per_sec: float
    completion_tok_per_sec: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    draft_speed_up: float
    first_token_seconds: float | None

    @property
    def prefix_hit_rate(self) -> float:
        """Return the fraction of prompt tokens found in the prefix cache."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


RATES: Final = ("prompt_tok_per_sec", "completion_tok_per_sec")
"""The engine keeps the last values of these when it is idle."""
COUNTS: Final = tuple(
    field.name for field in fields(ModelFigures) if field.name not in (*RATES, "draft_speed_up", "first_token_seconds")
)


@frozen(kw_only=True)
class ServerFigures:
    """Holds the metrics of a server.

    :ivar in_flight: running requests, without the request for these metrics
    :ivar requests: number of answered requests by status
    :ivar models: metrics of the models by name
    """

    in_flight: int
    requests: Mapping[str, int]
    models: Mapping[str, ModelFigures]

    @classmethod
    def from_text(cls, text: str) -> ServerFigures | None:
        """Parse the text of ``/metrics``; return None if it is not of this package's server."""
        models: dict[str, dict[str, float]] = {}
        requests: dict[str, int] = {}
        in_flight = None
        for name, labels, value in _samples(text):
            if "model" in labels:
                models.setdefault(labels["model"], {})[name] = value
            elif name == "http_requests_total":
                requests[labels["status"]] = requests.get(labels["status"], 0) + int(value)
            elif name == "http_requests_in_flight":
                in_flight = max(0, int(value) - 1)
        if in_flight is None:
            return None
        return cls(
            in_flight=in_flight, requests=requests, models={name: _figures(each) for name, each in models.items()}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as plain data, for JSON."""
        return asdict(self)


def _figures(of: Mapping[str, float]) -> ModelFigures:
    given: dict[str, Any] = {}
    for name in COUNTS:  # Prometheus appends _total to names of counters
        given[name] = int(of.get(name, of.get(f"{name}_total", 0)))
    for name in RATES:
        given[name] = of.get(name, 0.0) if given["running"] else 0.0
    count = of.get("time_to_first_token_seconds_count")
    first = of["time_to_first_token_seconds_sum"] / count if count else None
    return ModelFigures(**given, draft_speed_up=of.get("draft_speed_up", 1.0), first_token_seconds=first)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each sample whose name begins with ``PREFIX``."""
    for line in text.splitlines():
        if found := SAMPLE.fullmatch(line):
            labels = {name: ESCAPED.sub(_unescaped, value) for name, value in LABEL.findall(found[2] or "")}
            yield found[1], labels, float(found[3])


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]
