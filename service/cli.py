"""The `precis` command: run everything on one machine, upload documents, ask them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from precis.wire.presets import AUTO, CODEC_NAMES, PRESETS, TRIM_NAMES, VIEW_NAMES
from service import administer, listing, transfer
from service.batch_file import batch
from service.bench import bench
from service.calibrate import calibrate
from service.client import Client
from service.evaluate import evaluate, read_questions
from service.replies import ApiError
from service.summary import shown
from service.terminal import URL, AsJson, Url, err, out, ready, told
from service.up import DEFAULT_MODEL, Options, Supervisor

app = typer.Typer(no_args_is_help=True, help="Read a document once, ask it many times.")
for command in (
    calibrate,
    listing.ls,
    listing.show,
    listing.tighten,
    listing.rm,
    listing.models,
    administer.top,
    batch,
    bench,
):
    app.command()(command)
app.command("export")(transfer.export_context)
app.command("import")(transfer.import_context)
app.add_typer(administer.keys, name="keys")
app.add_typer(administer.tenants, name="tenants")


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
    raise typer.Exit(Supervisor(options, out).run())


@app.command()
@told
def put(
    file: Annotated[str, typer.Argument(help="PDF, DOCX, HTML, Markdown or text, or - for standard input")],
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
    split: Annotated[bool, typer.Option(help="split a text that is too long over several contexts")] = False,
    raw: Annotated[bool, typer.Option(help="store the text as it is, without the chat template")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the id only")] = False,
    as_json: AsJson = False,
    url: Url = URL,
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
    options: dict[str, Any] = {
        "name": name if name is not None else ("" if file == "-" else Path(file).name),
        "compression": {key: value for key, value in how.items() if value is not None},
        "pinned": pinned,
    }
    given = {"instructions": instructions, "ttl_s": ttl_s, "template": "raw" if raw else None}
    options |= {key: value for key, value in given.items() if value is not None} | (
        {"overflow": "split"} if split else {}
    )
    upload = {"file": (Path(file).name if file != "-" else "", _bytes(file))}
    context = client.call("POST", "/v1/contexts", files=upload, data={"options": json.dumps(options)})
    context = ready(client, context)
    shown(context, as_json, quiet)


@app.command()
@told
def append(
    context: Annotated[str, typer.Argument(help="id of a context")],
    file: Annotated[str, typer.Argument(help="a UTF-8 text file, or - for standard input")],
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Let a context grow by a text, and wait until it can be asked again."""
    client = Client(url)
    grown = client.call("POST", f"/v1/contexts/{context}/append", json={"text": _read(file)})
    found = ready(client, grown)
    shown(found, as_json)


def _bytes(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ApiError(f"{file} cannot be read: {error.strerror}") from error


def _read(file: str) -> str:
    try:
        return _bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ApiError(f"{file} is not UTF-8 text") from error


@app.command()
@told
def ask(
    context: Annotated[str, typer.Argument(help="id of a context")],
    question: Annotated[str | None, typer.Argument(help="what to ask; left out: a conversation")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 = always the likeliest token")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="for the same draws again")] = None,
    also: Annotated[list[str] | None, typer.Option(help="a further context to be read; may be repeated")] = None,
    view: Annotated[str | None, typer.Option(help=f"read only what matters: {', '.join(VIEW_NAMES)}")] = None,
    trim: Annotated[str | None, typer.Option(help=f"bound a long answer's memory: {', '.join(TRIM_NAMES)}")] = None,
    raw: Annotated[bool, typer.Option(help="text as it is, for contexts with the raw template")] = False,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Ask a context a question, or talk about it; answers stream."""
    client = Client(url)
    how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    how |= {
        key: value
        for key, value in {"seed": seed, "view": view, "trim": trim, "also": also}.items()
        if value is not None
    }
    if question is None:
        _talk(client, context, {**how, "session": client.session(context)})
        return
    asked, how = (None, {**how, "prompt": question}) if raw else (question, how)
    if as_json:
        out.print_json(data=client.ask(context, asked, **how).raw)
    else:
        _streamed(client, context, asked, how)


def _talk(client: Client, context: str, how: dict[str, Any]) -> None:
    """Turn after turn until the end of the input; Ctrl-C stops an answer, which then was never said."""
    err.print("Ask; an empty line or Ctrl-D ends.", style="dim")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not question:
            return
        try:
            _streamed(client, context, question, how)
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _streamed(client: Client, context: str, question: str | None, how: dict[str, Any]) -> None:
    """Print an answer as it comes."""
    try:
        for piece in client.ask_stream(context, question, **how):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


@app.command("eval")
@told
def evaluate_document(
    file: Annotated[str, typer.Argument(help="a UTF-8 text file")],
    questions: Annotated[str, typer.Argument(help='lines of {"question": "...", "answers": ["..."]}')],
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = AUTO,
    keep_ratios: Annotated[str, typer.Option(help="shares of entries kept, separated by commas")] = "0.25,0.125",
    codec: Annotated[str | None, typer.Option(help=", ".join(CODEC_NAMES))] = None,
    ratios: Annotated[str, typer.Option(help="of the codec tc with everything kept, separated by commas")] = "",
    as_json: AsJson = False,
    url: Url = URL,
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
    with err.status(f"asking {len(asked)} questions of {len(ways) + 1} snapshots"):
        for found in evaluate(Client(url), _read(file), asked, ways):
            storage = found.context["storage"]
            if as_json:
                fidelity, measured = (
                    found.context["fidelity"],
                    {"right": found.right, "f1": found.f1, "as_full": found.same},
                )
                typer.echo(json.dumps({"way": found.name, "storage": storage, "fidelity": fidelity, **measured}))
            table.add_row(
                found.name,
                f"{storage['stored_bytes'] / 1e6:.2f}",
                f"{storage['kept_ratio']:.3f}",
                f"{found.right:.2f}",
                f"{found.f1:.2f}",
                f"{found.same:.2f}",
                f"{found.context['fidelity']['kl']:.3f}",
            )
    if not as_json:
        out.print(table)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ApiError(f"{text!r} is not a number") from error


if __name__ == "__main__":
    app()
