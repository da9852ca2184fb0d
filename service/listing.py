"""Commands about what is stored."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from service.client import Client
from service.summary import shown
from service.terminal import URL, AsJson, Url, out, ready, told


@told
def ls(
    limit: Annotated[int, typer.Option(help="contexts at most")] = 50,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="go on looking, until Ctrl-C")] = False,
    every_s: Annotated[float, typer.Option(help="seconds between looks")] = 1.0,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """List contexts, the newest first."""
    client = Client(url)

    def look() -> dict[str, Any]:
        return client.call("GET", "/v1/contexts", params={"limit": limit})

    if as_json:
        out.print_json(data=look())
    elif not watch:
        out.print(_listed(look()))
    else:
        with Live(_listed(look()), console=out) as live, contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(every_s)
                live.update(_listed(look()))


def _listed(found: dict[str, Any]) -> Table:
    table = Table()
    for header in ("context", "name", "status"):
        table.add_column(header, no_wrap=header == "context", max_width=None if header == "context" else 16)
    for header in ("tokens", "MB", "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    for context in found["data"]:
        storage, progress = context["storage"], context["progress"]
        reading = context["status"] == "prefilling" and progress["total"]
        table.add_row(
            context["id"],
            context["name"],
            f"reading {progress['processed'] / progress['total']:.0%}" if reading else context["status"],
            f"{context['usage']['total_tokens']:,}",
            f"{storage['stored_bytes'] / 1e6:.2f}" if storage["stored_bytes"] else "-",
            f"{storage['ratio']:.1f}x" if storage["ratio"] else "-",
        )
    return table


@told
def show(
    context: Annotated[str, typer.Argument(help="id of a context")],
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """What a context takes, and what was traded for it."""
    found = Client(url).call("GET", f"/v1/contexts/{context}")
    shown(found, as_json)


@told
def tighten(
    context: Annotated[str, typer.Argument(help="id of a context")],
    keep_ratio: Annotated[float, typer.Argument(help="share of entries to keep, less than now")],
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Keep less of a context, without reading its document again."""
    client = Client(url)
    found = client.call("PATCH", f"/v1/contexts/{context}", json={"compression": {"keep_ratio": keep_ratio}})
    told_of = ready(client, found)
    shown(told_of, as_json)


@told
def rm(
    contexts: Annotated[list[str], typer.Argument(help="ids of contexts")], as_json: AsJson = False, url: Url = URL
) -> None:
    """Delete contexts."""
    client = Client(url)
    for context in contexts:
        gone = client.call("DELETE", f"/v1/contexts/{context}")
        text = f"{context} deleted, {gone['freed_bytes'] / 1e6:.2f} MB freed"
        typer.echo(json.dumps(gone) if as_json else text)


@told
def models(as_json: AsJson = False, url: Url = URL) -> None:
    """List models with a live worker."""
    found = Client(url).call("GET", "/v1/models")
    if as_json:
        out.print_json(data=found)
        return
    table = Table("model", "context tokens", "dtype", "cache MB per 1,000 tokens")
    for model in found["data"]:
        table.add_row(
            model["id"], f"{model['max_context']:,}", model["dtype"], f"{model['raw_bytes_per_token'] / 1e3:.1f}"
        )
    out.print(table)
