"""A context in a few lines, for people."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from service.terminal import out


def shown(context: dict[str, Any], as_json: bool, quiet: bool = False) -> None:
    """Print a context as asked for: as JSON, by its id alone, or in words."""
    if as_json:
        out.print_json(data=context)
    elif quiet:
        typer.echo(context["id"])
    else:
        out.print(summary(context))


def summary(context: dict[str, Any]) -> Table:
    """What a context takes, and what was traded for it."""
    storage, fidelity = context["storage"], context["fidelity"]
    table = Table(show_header=False)
    rows = {"context": context["id"], "name": context["name"], "status": context["status"]}
    known = {name: value for name, value in context["policy"].items() if name not in ("transform", "artifact")}
    rows["compression"] = ", ".join(f"{name} {_told(value)}" for name, value in known.items())
    rows["tokens"] = f"{context['usage']['total_tokens']:,}"
    if context["error"]:
        rows["error"] = context["error"]["detail"]
    if storage["stored_bytes"]:
        rows |= {
            "raw MB": f"{storage['raw_bytes'] / 1e6:.1f}",
            "stored MB": f"{storage['stored_bytes'] / 1e6:.2f}",
            "ratio": f"{storage['ratio']:.1f}x",
            "kept": f"{storage['kept_ratio']:.1%}",
            "fidelity": "not measured",
        }
    if fidelity:
        rows["fidelity"] = f"KL {fidelity['kl']:.4f} nats per token, top-1 {fidelity['top1_agreement']:.1%}"
    if seconds := sum(context["timings"].get(name, 0) for name in ("prefill_ms", "compress_ms", "store_ms")) / 1000:
        rows["seconds"] = f"{seconds:.1f}"
    for label, value in rows.items():
        if value:
            table.add_row(label, value)
    return table


def _told(value: Any) -> str:
    return ", ".join(f"{name} {own}" for name, own in value.items()) if isinstance(value, dict) else str(value)
