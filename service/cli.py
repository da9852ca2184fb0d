"""The `precis` command: run everything on one machine, upload documents, ask them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from precis.wire.presets import AUTO, CODEC_NAMES, PRESETS, TRIM_NAMES, VIEW_NAMES
from service.calibrate import calibrate
from service.client import ApiError, Client
from service.evaluate import evaluate, read_questions
from service.summary import summary
from service.up import DEFAULT_MODEL, Options, Supervisor

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Read a document once, ask it many times.")
app.command()(calibrate)
_out, _err = Console(), Console(stderr=True)
Url = Annotated[str, typer.Option(envvar="PRECIS_URL", help="server to talk to")]
_URL = "http://127.0.0.1:8000"
_STAGES = {
    "queued": "waiting",
    "prefill": "reading",
    "score": "weighing",
    "search": "searching",
    "scored": "packing",
    "tighten": "cutting",
    "storing": "storing",
}


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a refusal into one line and exit code 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ApiError as error:
            _err.print(f"[red]precis:[/] {error}", highlight=False)
            raise typer.Exit(1) from error

    return run


@app.command()
def up(
    port: Annotated[int, typer.Option(help="port of the API; 0: a free one")] = 8000,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    data_dir: Annotated[Path, typer.Option(envvar="PRECIS_DATA_DIR", help="where everything is kept")] = Path(
        "~/.local/share/precis"
    ),
    model: Annotated[str, typer.Option(envvar="PRECIS_MODEL", help="a folder or a Hugging Face id")] = DEFAULT_MODEL,
    policy: Annotated[str, typer.Option(help=f"policy of uploads that name none: {', '.join(PRESETS)}")] = AUTO,
    ready_file: Annotated[Path | None, typer.Option(help="write the URL there once requests can be served")] = None,
) -> None:
    """Run store, API and one worker on this machine until Ctrl-C."""
    if policy not in (AUTO, *PRESETS):
        raise typer.BadParameter(f"choose one of {', '.join(PRESETS)}", param_hint="--policy")
    options = Options(host, port, data_dir.expanduser().resolve(), model, policy, ready_file)
    raise typer.Exit(Supervisor(options, _out).run())


@app.command()
@_told
def put(
    file: Annotated[str, typer.Argument(help="a UTF-8 text file, or - for standard input")],
    policy: Annotated[str | None, typer.Option(help=", ".join(PRESETS))] = None,
    keep_ratio: Annotated[float | None, typer.Option(help="share of entries kept")] = None,
    codec: Annotated[str | None, typer.Option(help=", ".join(CODEC_NAMES))] = None,
    ratio: Annotated[float | None, typer.Option(help="for the codec tc: how many times smaller than the cache")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="keep as much as fits into so many bytes")] = None,
    max_kl: Annotated[float | None, typer.Option(help="keep as little as this divergence allows, in nats")] = None,
    probe: Annotated[list[str] | None, typer.Option(help="a representative question; may be repeated")] = None,
    name: Annotated[str | None, typer.Option(help="a name to remember it by")] = None,
    instructions: Annotated[str | None, typer.Option(help="system message before the document")] = None,
    ttl_s: Annotated[int | None, typer.Option(help="seconds to live")] = None,
    pinned: Annotated[bool, typer.Option(help="never expire")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the id only")] = False,
    url: Url = _URL,
) -> None:
    """Upload a document and wait until it can be asked."""
    client = Client(url)
    how = {
        "policy": policy,
        "keep_ratio": keep_ratio,
        "codec": codec if ratio is None else {"name": codec or "tc", "ratio": ratio},
        "max_bytes": max_bytes,
        "max_kl": max_kl,
        "probes": probe or None,
    }
    body: dict[str, Any] = {
        "text": _read(file),
        "name": name if name is not None else ("" if file == "-" else Path(file).name),
        "compression": {key: value for key, value in how.items() if value is not None},
        "pinned": pinned,
    }
    body |= {key: value for key, value in {"instructions": instructions, "ttl_s": ttl_s}.items() if value is not None}
    context = client.call("POST", "/v1/contexts", json=body)
    context = _ready(client, context)
    if quiet:
        typer.echo(context["id"])
    else:
        _out.print(summary(context))


def _read(file: str) -> str:
    try:
        return sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_text("utf-8")
    except OSError as error:
        raise ApiError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ApiError(f"{file} is not UTF-8 text") from error


def _ready(client: Client, context: dict[str, Any]) -> dict[str, Any]:
    """The context as it is when its work is done, with a progress bar until then."""
    if context["status"] not in ("ready", "failed"):
        _follow(client, context)
        context = client.call("GET", f"/v1/contexts/{context['id']}")
    if context["status"] != "ready":
        raise ApiError((context["error"] or {}).get("detail", f"the context is {context['status']}"))
    return context


def _follow(client: Client, context: dict[str, Any]) -> None:
    """A progress bar until the context is ready or failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err, transient=True) as progress:
        task = progress.add_task("waiting", total=None)
        for event in client.stream("GET", f"/v1/contexts/{context['id']}/events"):
            progress.update(task, description=_STAGES.get(event.name, event.name))
            if event.data.get("total") and event.name in ("prefill", "score"):
                progress.update(task, completed=event.data["processed"], total=event.data["total"])


@app.command()
@_told
def ask(
    context: Annotated[str, typer.Argument(help="id of a context")],
    question: Annotated[str, typer.Argument(help="what to ask")],
    max_tokens: Annotated[int, typer.Option(help="tokens at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 = always the likeliest token")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="for the same draws again")] = None,
    view: Annotated[str | None, typer.Option(help=f"read only what matters: {', '.join(VIEW_NAMES)}")] = None,
    trim: Annotated[str | None, typer.Option(help=f"bound a long answer's memory: {', '.join(TRIM_NAMES)}")] = None,
    raw: Annotated[bool, typer.Option(help="text as it is, for contexts with the raw template")] = False,
    url: Url = _URL,
) -> None:
    """Ask a context a question; the answer streams."""
    body: dict[str, Any] = {"prompt" if raw else "question": question, "max_tokens": max_tokens}
    body |= {"temperature": temperature, "stream": True}
    body |= {key: value for key, value in {"seed": seed, "view": view, "trim": trim}.items() if value is not None}
    for event in Client(url).stream("POST", f"/v1/contexts/{context}/queries", json=body):
        if event.name == "token":
            sys.stdout.write(event.data["text"])
            sys.stdout.flush()
        elif event.name == "error":
            sys.stdout.write("\n")
            raise ApiError(event.data["detail"])
    sys.stdout.write("\n")


@app.command("eval")
@_told
def evaluate_document(
    file: Annotated[str, typer.Argument(help="a UTF-8 text file")],
    questions: Annotated[str, typer.Argument(help='lines of {"question": "...", "answers": ["..."]}')],
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = AUTO,
    keep_ratios: Annotated[str, typer.Option(help="shares of entries kept, separated by commas")] = "0.25,0.125",
    codec: Annotated[str | None, typer.Option(help=", ".join(CODEC_NAMES))] = None,
    ratios: Annotated[str, typer.Option(help="of the codec tc with everything kept, separated by commas")] = "",
    url: Url = _URL,
) -> None:
    """Ask your own questions of the full cache and of compressed ones, and compare."""
    ways = [
        {"policy": policy, "keep_ratio": _number(ratio), **({"codec": codec} if codec else {})}
        for policy in policies.split(",")
        for ratio in filter(None, keep_ratios.split(","))
    ]
    ways += [{"codec": {"name": "tc", "ratio": _number(ratio)}} for ratio in filter(None, ratios.split(","))]
    asked = read_questions(_read(questions))
    table = Table("way", "stored MB", "kept", "right", "F1", "as full", "KL")
    with _err.status(f"asking {len(asked)} questions of {len(ways) + 1} snapshots"):
        for found in evaluate(Client(url), _read(file), asked, ways):
            storage = found.context["storage"]
            table.add_row(
                found.name,
                f"{storage['stored_bytes'] / 1e6:.2f}",
                f"{storage['kept_ratio']:.3f}",
                f"{found.right:.2f}",
                f"{found.f1:.2f}",
                f"{found.same:.2f}",
                f"{found.context['fidelity']['kl']:.3f}",
            )
    _out.print(table)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ApiError(f"{text!r} is not a number") from error


@app.command()
@_told
def ls(limit: Annotated[int, typer.Option(help="contexts at most")] = 50, url: Url = _URL) -> None:
    """List contexts, the newest first."""
    table = Table()
    for header in ("context", "name", "status"):
        table.add_column(header, no_wrap=header == "context", max_width=None if header == "context" else 16)
    for header in ("tokens", "MB", "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    for context in Client(url).call("GET", "/v1/contexts", params={"limit": limit})["data"]:
        storage = context["storage"]
        table.add_row(
            context["id"],
            context["name"],
            context["status"],
            f"{context['usage']['total_tokens']:,}",
            f"{storage['stored_bytes'] / 1e6:.2f}" if storage["stored_bytes"] else "-",
            f"{storage['ratio']:.1f}x" if storage["ratio"] else "-",
        )
    _out.print(table)


@app.command()
@_told
def show(
    context: Annotated[str, typer.Argument(help="id of a context")],
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    url: Url = _URL,
) -> None:
    """What a context takes, and what was traded for it."""
    found = Client(url).call("GET", f"/v1/contexts/{context}")
    if as_json:
        _out.print_json(data=found)
    else:
        _out.print(summary(found))


@app.command()
@_told
def tighten(
    context: Annotated[str, typer.Argument(help="id of a context")],
    keep_ratio: Annotated[float, typer.Argument(help="share of entries to keep, less than now")],
    url: Url = _URL,
) -> None:
    """Keep less of a context, without reading its document again."""
    client = Client(url)
    found = client.call("PATCH", f"/v1/contexts/{context}", json={"compression": {"keep_ratio": keep_ratio}})
    _out.print(summary(_ready(client, found)))


@app.command()
@_told
def rm(contexts: Annotated[list[str], typer.Argument(help="ids of contexts")], url: Url = _URL) -> None:
    """Delete contexts."""
    client = Client(url)
    for context in contexts:
        freed = client.call("DELETE", f"/v1/contexts/{context}")["freed_bytes"]
        typer.echo(f"{context} deleted, {freed / 1e6:.2f} MB freed")


@app.command()
@_told
def models(url: Url = _URL) -> None:
    """List models with a live worker."""
    table = Table("model", "context tokens", "dtype", "cache MB per 1,000 tokens")
    for model in Client(url).call("GET", "/v1/models")["data"]:
        table.add_row(
            model["id"], f"{model['max_context']:,}", model["dtype"], f"{model['raw_bytes_per_token'] / 1e3:.1f}"
        )
    _out.print(table)


if __name__ == "__main__":
    app()
