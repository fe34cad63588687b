"""Runs ``paged-sdk top``: shows a server's live statistics."""

from __future__ import annotations

from typing import Annotated

import typer

from paged_sdk.cli import options
from paged_sdk.cli.groups import Setting, grouped

__all__ = ["top"]

Url = Annotated[str, typer.Argument(metavar="URL", help="The server's address."), Setting("url")]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar="PAGED_SDK_API_KEY", help="The server's API key, if it has one."),
]
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")]
Once = Annotated[bool, typer.Option("--once", help="Print one table and exit.")]


@grouped
def top(
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    interval: Interval = 1.0,
    once: Once = False,
    json: options.Json = False,
    output: options.OutputOptions,
) -> None:
    """Show live statistics of a server: sequences, tokens per second, memory, prefix cache, drafts.

    It reads the server's /metrics. If stdout is not a terminal, it prints one table.
    """
    # Imported late, so that --help is fast.
    from paged_sdk.cli.dashboard import Dashboard
    from paged_sdk.cli.flags import reporting

    with reporting(top, output):
        dashboard = Dashboard(url, key=api_key)
        if json:
            typer.echo(dashboard.to_json())
        elif once or not dashboard.is_live:
            dashboard.show()
        else:
            dashboard.watch(interval)
