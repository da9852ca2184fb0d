"""Commands for whoever runs the server: keys, tenants, and what is going on."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from service.client import Client
from service.terminal import URL, AsJson, Url, out, told

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke keys. Needs the scope admin.")
tenants = typer.Typer(no_args_is_help=True, help="What tenants take and may take. Needs the scope admin.")


@keys.command("create")
@told
def create_key(
    tenant: Annotated[str, typer.Option(help="whose contexts it sees")] = "default",
    scope: Annotated[list[str] | None, typer.Option(help="ask, write or admin; may be repeated")] = None,
    name: Annotated[str, typer.Option(help="a name to remember it by")] = "",
    ttl_s: Annotated[int | None, typer.Option(help="seconds to live")] = None,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Make a key. It is printed this once."""
    body: dict[str, Any] = {"tenant": tenant, "scopes": scope or ["ask", "write"], "name": name, "ttl_s": ttl_s}
    made = Client(url).call("POST", "/v1/admin/keys", json=body)
    if as_json:
        out.print_json(data=made)
    else:
        typer.echo(made["key"])


@keys.command("ls")
@told
def list_keys(as_json: AsJson = False, url: Url = URL) -> None:
    """List keys."""
    found = Client(url).call("GET", "/v1/admin/keys")
    if as_json:
        out.print_json(data=found)
        return
    table = Table("key", "tenant", "scopes", "name", "until")
    for key in found["data"]:
        table.add_row(key["id"], key["tenant"], ", ".join(key["scopes"]), key["name"], key["expire_time"] or "revoked")
    out.print(table)


@keys.command("revoke")
@told
def revoke_key(key_id: Annotated[str, typer.Argument(help="id of a key")], url: Url = URL) -> None:
    """Make a key worthless."""
    Client(url).call("DELETE", f"/v1/admin/keys/{key_id}")
    typer.echo(f"{key_id} revoked")


@tenants.command("show")
@told
def show_tenant(
    tenant: Annotated[str, typer.Argument(help="name of a tenant")], as_json: AsJson = False, url: Url = URL
) -> None:
    """What a tenant takes and may take."""
    found = Client(url).call("GET", f"/v1/admin/tenants/{tenant}")
    if as_json:
        out.print_json(data=found)
        return
    table = Table("", "now", "at most")
    bounds = {"contexts": "max_contexts", "bytes": "max_bytes", "active": "max_active"}
    for name, bound in bounds.items():
        most = found["quota"][bound]
        table.add_row(name, f"{found['usage'][name]:,}", f"{most:,}" if most else "any number")
    table.add_row("requests a minute", "", str(found["quota"]["requests_per_minute"] or "any number"))
    out.print(table)


@tenants.command("quota")
@told
def set_quota(
    tenant: Annotated[str, typer.Argument(help="name of a tenant")],
    contexts: Annotated[int, typer.Option(help="contexts at most; 0: any number")] = 0,
    n_bytes: Annotated[int, typer.Option("--bytes", help="stored bytes at most; 0: any number")] = 0,
    active: Annotated[int, typer.Option(help="contexts in work at most; 0: any number")] = 0,
    requests_per_minute: Annotated[int, typer.Option(help="0: any number")] = 0,
    url: Url = URL,
) -> None:
    """Bound a tenant."""
    body = {"max_contexts": contexts, "max_bytes": n_bytes, "max_active": active}
    body["requests_per_minute"] = requests_per_minute
    Client(url).call("PUT", f"/v1/admin/tenants/{tenant}/quota", json=body)
    show_tenant(tenant, as_json=False, url=url)


@told
def top(
    once: Annotated[bool, typer.Option(help="print and end")] = False,
    every_s: Annotated[float, typer.Option(help="seconds between looks")] = 1.0,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Workers, queues and what is saved, until Ctrl-C."""
    client = Client(url)
    if as_json:
        out.print_json(data=_looked(client))
    elif once:
        out.print(_drawn(_looked(client)))
    else:
        with Live(_drawn(_looked(client)), console=out, screen=False) as live:
            while True:
                time.sleep(every_s)
                live.update(_drawn(_looked(client)))


def _looked(client: Client) -> dict[str, Any]:
    workers = client.call("GET", "/v1/workers")["data"]
    queues = client.call("GET", "/v1/queues")["data"]
    contexts = [c for c in client.call("GET", "/v1/contexts", params={"limit": 200})["data"] if c["status"] == "ready"]
    totals = {name: sum(c["storage"][name] for c in contexts) for name in ("raw_bytes", "stored_bytes")}
    return {"workers": workers, "queues": queues, "contexts": {"ready": len(contexts), **totals}}


def _drawn(found: dict[str, Any]) -> Group:
    workers = Table("worker", "host", "device", "role", "model", "answers", "snapshots held")
    for w in found["workers"]:
        load = f"{w['load']}/{w['slots']}"
        workers.add_row(w["id"], w["host"], w["device"], w["role"], w["model"], load, str(w["hot"]))
    queues = Table("model", "documents in work", "answers in work")
    for queue in found["queues"]:
        queues.add_row(queue["model"], str(queue["compressions"]), str(queue["answers"]))
    own = found["contexts"]
    ratio = f", {own['raw_bytes'] / own['stored_bytes']:.1f} times smaller" if own["stored_bytes"] else ""
    saved = (
        f"{own['ready']} contexts ready: {own['stored_bytes'] / 1e6:.1f} MB for {own['raw_bytes'] / 1e6:.1f} MB{ratio}"
    )
    return Group(workers, queues, saved)
