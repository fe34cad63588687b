"""Shows a server's metrics in the terminal."""

from __future__ import annotations

import ipaddress
import json
import time
from contextlib import suppress
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paged_sdk import ConfigError, PagedError
from paged_sdk.cli.server_figures import ModelFigures, ServerFigures

__all__ = ["Dashboard"]

SECONDS_TO_ANSWER = 10.0


class Dashboard:
    """Reads a server's metrics and shows them on stdout.

    :param url: the server's address, with or without ``/metrics`` or ``/v1`` at its end
    :param key: the server's API key; surrounding white space is ignored
    :param console: the console to print to; None: stdout
    :raises ConfigError: invalid address or key
    """

    def __init__(self, url: str, *, key: str | None = None, console: Console | None = None) -> None:
        base = url if "://" in url else f"http://{url}"
        if not _is_address(base):
            raise ConfigError.of("url", url, "the address of a server, such as http://127.0.0.1:8000")
        self._url = base.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
        # Bypass proxies of the environment for this machine: a proxy's localhost is another machine.
        self._opener = build_opener(*([ProxyHandler({})] if _is_here(base) else []))
        self._key = None if key is None else key.strip()
        if self._key is not None and not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError.of("api_key", "...", "printable ASCII")
        self._console = console or Console(highlight=False, markup=False)  # brackets in a model's name are not markup

    @property
    def is_live(self) -> bool:
        """Tell whether the console is a terminal, on which the metrics can be updated in place."""
        return self._console.is_terminal

    def to_json(self) -> str:
        """Return the metrics as one JSON object.

        :raises PagedError: the metrics cannot be read
        """
        return json.dumps({"url": self._url, **self._read().to_dict()}, indent=2)

    def show(self) -> None:
        """Print the metrics once.

        :raises PagedError: the metrics cannot be read
        """
        self._console.print(self._page(self._read()))

    def watch(self, interval: float) -> None:
        """Update the metrics until Ctrl-C, even if the server is temporarily unreachable.

        :param interval: seconds between updates
        :raises PagedError: the first read failed
        """
        page = self._page(self._read())
        with suppress(KeyboardInterrupt), Live(page, console=self._console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    page = self._page(self._read())
                    live.update(page, refresh=True)
                except PagedError as error:
                    live.update(Group(page, Text(str(error), style="red")), refresh=True)

    def _read(self) -> ServerFigures:
        address = f"{self._url}/metrics"
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            with self._opener.open(Request(address, headers=headers), timeout=SECONDS_TO_ANSWER) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            with error:
                why = "the server needs an API key: --api-key" if error.code == 401 else f"{error.code} {error.reason}"
            raise PagedError(f"no figures from {address}: {why}") from error
        except (OSError, ValueError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else str(error) or type(error).__name__
            advice = ": is paged-sdk serve running there?" if isinstance(reason, ConnectionRefusedError) else ""
            raise PagedError(f"no answer from {address}: {reason}{advice}") from error
        figures = ServerFigures.from_text(text)
        if figures is None:
            raise PagedError(f"no figures from {address}: it is not a server of this package")
        return figures

    def _page(self, figures: ServerFigures) -> RenderableType:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(figures.requests.items()))
        head = Text.assemble(
            (self._url, "bold"), f"  {figures.in_flight} requests under way; answered: {answers or 'none'}"
        )
        return Group(head, *(_table(name, each) for name, each in sorted(figures.models.items())))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        return False


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _table(name: str, of: ModelFigures) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold cyan", show_header=False, min_width=64)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("sequences", f"{of.running} running", f"{of.waiting} waiting")
    table.add_row("generated", f"{of.completion_tok_per_sec:,.1f} tok/s", f"{of.completion_tokens:,} tokens so far")
    table.add_row("prompts", f"{of.prompt_tok_per_sec:,.1f} tok/s", f"{of.prompt_tokens:,} tokens computed so far")
    if of.first_token_seconds is not None:
        table.add_row("first token", f"{1000 * of.first_token_seconds:,.0f} ms", "after the request, on average")
    if of.blocks_total:
        share = of.blocks_used / of.blocks_total
        pinned = f", {of.blocks_pinned:,} are pinned" if of.blocks_pinned else ""
        rest = f"of {of.blocks_total:,} blocks; {of.blocks_cached:,} hold prefixes{pinned}"
        table.add_row("KV memory", Text(f"{share:.0%}", style="red" if share > 0.9 else ""), rest)
    table.add_row("prefix cache", f"{of.prefix_hit_rate:.0%}", f"of {of.prefix_queries:,} prompt tokens found")
    if of.drafted_tokens:
        right = of.accepted_tokens / of.drafted_tokens
        gain = f"of {of.drafted_tokens:,}; texts are {of.draft_speed_up:.2f} times as fast"
        table.add_row("drafts", f"{right:.0%} right", gain)
    if of.preemptions:
        table.add_row("preemptions", f"{of.preemptions:,}", "sequences gave up their memory for others")
    return table
