"""Holds what a server answers to its own OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Judge", "sent_events"]

END: Final = "[DONE]"
CLIENT_DISCONNECTED: Final = 499


class Judge:
    """Surrounds an application, and collects what its answers have that the document does not.

    :param document: the OpenAPI document
    :param faults: takes what is wrong
    """

    def __init__(self, app: ASGIApp, document: Mapping[str, Any], faults: list[str]) -> None:
        self._app = app
        self._document = document
        self._faults = faults
        self._validators: dict[str, Draft202012Validator] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent: list[Message] = []

        async def note(message: Message) -> None:
            sent.append(message)
            await send(message)

        await self._app(scope, receive, note)
        route = scope.get("route")
        path: str = scope["path"] if route is None else route.path.replace(":path}", "}")
        described = self._document["paths"].get(path, {}).get(scope["method"].lower())
        if described is not None and sent and sent[0]["status"] != CLIENT_DISCONNECTED:
            try:
                self.check(f"{scope['method']} {path}", described["responses"], sent)
            except Exception as error:  # whatever it is, it belongs into the test, not into the answer
                self._faults.append(f"{path}: {error!r}")

    def check(self, at: str, described: Mapping[str, Any], sent: list[Message]) -> None:
        """Compare one answer with what is described for its path."""
        status = str(sent[0]["status"])
        headers = dict(sent[0]["headers"])
        kind = headers.get(b"content-type", b"").decode().partition(";")[0]
        body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
        is_whole = not sent[-1].get("more_body", False)
        content = described.get(status, {}).get("content", {})
        if kind not in content:
            self._faults.append(f"{at}: {status} of {kind!r} is not described: {body[:200]}")
        elif kind == "application/json":
            self._hold(f"{at} {status}", content[kind]["schema"], json.loads(body))
        elif kind == "text/event-stream":
            schema = content[kind]["schema"]
            data = schema["properties"]["data"]
            data_schema = next(each for each in data.get("anyOf", [data]) if "contentSchema" in each)["contentSchema"]
            for event in sent_events(body if is_whole else body.rpartition("\n\n")[0]):
                self._hold(f"{at} event", schema, event)
                if event["data"] == END:
                    continue
                value = json.loads(event["data"])
                self._hold(f"{at} data", data_schema, value)
                if event.get("event", value.get("type")) != value.get("type"):
                    self._faults.append(f"{at}: {event['event']} is the name of {value.get('type')}")

    def _hold(self, at: str, schema: Mapping[str, Any], value: object) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator({**schema, "components": self._document["components"]})
        error = best_match(self._validators[key].iter_errors(value))
        if error is not None:
            self._faults.append(f"{at}: {error.json_path}: {error.message[:300]} in {json.dumps(value)[:600]}")


def sent_events(text: str) -> Iterator[dict[str, str]]:
    """Return the events of a stream, each as its fields; comments are left out."""
    for event in text.split("\n\n"):
        lines = [line.partition(": ") for line in event.split("\n") if line and not line.startswith(":")]
        if lines:
            yield {name: value for name, _, value in lines}
