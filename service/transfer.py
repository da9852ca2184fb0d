"""Commands that carry contexts from one cluster to another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from service.client import Client
from service.replies import ApiError
from service.summary import shown
from service.terminal import URL, AsJson, Url, err, ready, told

_PIECE = 1 << 20


@told
def export_context(
    context: Annotated[str, typer.Argument(help="id of a context")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="default: ID.precis; - for the terminal")
    ] = None,
    url: Url = URL,
) -> None:
    """Write a context to a file: its record, its document as tokens, its snapshot."""
    target = output or Path(f"{context}.precis")
    pieces = Client(url).download(f"/v1/contexts/{context}/snapshot")
    if str(target) == "-":
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        return
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        partial.rename(target)
    except OSError as error:
        raise ApiError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    err.print(f"{target}: {target.stat().st_size / 1e6:.2f} MB", style="dim", highlight=False)


@told
def import_context(
    file: Annotated[Path, typer.Argument(help="written by precis export")],
    name: Annotated[str | None, typer.Option(help="a name to remember it by; default: as it was")] = None,
    ttl_s: Annotated[int | None, typer.Option(help="seconds to live")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the id only")] = False,
    as_json: AsJson = False,
    url: Url = URL,
) -> None:
    """Take over a context that was exported, here or elsewhere."""
    client = Client(url)
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            options: dict[str, Any] = {key: value for key, value in {"name": name, "ttl_s": ttl_s}.items() if value}
            headers = {"content-length": str(size), "content-type": "application/vnd.precis.context"}
            context = client.call(
                "POST", "/v1/contexts/import", content=_pieces(opened), params=options, headers=headers
            )
    except OSError as error:
        raise ApiError(f"{file} cannot be read: {error.strerror}") from error
    context = ready(client, context)
    shown(context, as_json, quiet)


def _pieces(opened: BinaryIO) -> Iterator[bytes]:
    while piece := opened.read(_PIECE):
        yield piece
