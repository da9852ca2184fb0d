"""What the commands share: the two consoles, how to reach the server, and how a refusal looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from service.client import DEFAULT_URL, Client
from service.replies import ApiError

out, err = Console(), Console(stderr=True)
Url = Annotated[str, typer.Option(envvar="PRECIS_URL", help="server to talk to")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
URL = DEFAULT_URL
_STAGES = {
    "queued": "waiting",
    "prefill": "reading",
    "score": "weighing",
    "search": "searching",
    "scored": "packing",
    "tighten": "cutting",
    "storing": "storing",
}


def told(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a refusal into one line and exit code 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ApiError as error:
            err.print(f"[red]precis:[/] {error}", highlight=False)
            raise typer.Exit(1) from error

    return run


def ready(client: Client, context: dict[str, Any]) -> dict[str, Any]:
    """The context as it is when its work is done, with a progress bar until then."""
    if context["status"] not in ("ready", "failed"):
        _follow(client, context)
        context = client.call("GET", f"/v1/contexts/{context['id']}")
    for part in context.get("parts", []):
        ready(client, client.call("GET", f"/v1/contexts/{part}"))
    if context["status"] != "ready":
        raise ApiError((context["error"] or {}).get("detail", f"the context is {context['status']}"))
    return context


def _follow(client: Client, context: dict[str, Any]) -> None:
    """A progress bar until the context is ready or failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("waiting", total=None)
        for event in client.stream("GET", f"/v1/contexts/{context['id']}/events"):
            progress.update(task, description=_STAGES.get(event.name, event.name))
            if event.data.get("total") and event.name in ("prefill", "score"):
                progress.update(task, completed=event.data["processed"], total=event.data["total"])
