"""docs/api.md, made of what the routes say of themselves: `python -m service.reference > docs/api.md`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from precis import errors
from service.app import create_app
from service.problems import STATUS
from service.settings import Settings

_HEAD = """# API reference

Made of the routes themselves by `python -m service.reference > docs/api.md`; the running server has the same as
`/openapi.json`. Bodies are JSON but for files. Every answer route carries `x-cache` and counts `cached_tokens`.
"""
_GROUPS = {
    "contexts": "Contexts",
    "queries": "Questions",
    "sessions": "Sessions",
    "openai": "OpenAI's routes",
    "gemini": "Gemini's routes",
    "admin": "Administration",
    "system": "The service itself",
    "page": "The page",
}


def main() -> None:
    """Print the reference."""
    sys.stdout.write(reference())


def reference() -> str:
    """All of it, as Markdown."""
    schema = create_app(Settings()).openapi()
    parts = [_HEAD]
    for tag, title in _GROUPS.items():
        found = [
            _route(method, path, told, schema)
            for path, methods in schema["paths"].items()
            for method, told in methods.items()
            if told.get("tags", ["page"])[0] == tag
        ]
        if found:
            parts += [f"## {title}\n", *found]
    return "\n".join([*parts, _objects("\n".join(parts), schema["components"]["schemas"]), _errors()])


def _objects(text: str, known: dict[str, Any]) -> str:
    """The objects that fields are made of, and those that these are made of."""
    wanted = [name for name in known if f" {name} |" in text or f" {name} " in text]
    parts, at = ["## Objects\n"], 0
    while at < len(wanted):
        name, at = wanted[at], at + 1
        rows = list(_fields(known[name], {"components": {"schemas": known}}))
        told = " ".join(known[name].get("description", "").split())
        parts.append(f"### {name}\n\n{told}\n\n| field | type | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
        wanted += [other for other in known if other not in wanted and re.search(rf"\b{other}\b", "\n".join(rows))]
    return "\n".join(parts)


def _route(method: str, path: str, told: dict[str, Any], schema: dict[str, Any]) -> str:
    text = " ".join(told.get("description", told.get("summary", "")).split())
    lines = [f"### `{method.upper()} {path}`\n", text + "\n"]
    rows = [
        _row(each["name"], each["schema"], each.get("required", False), each.get("description", ""))
        for each in told.get("parameters", [])
        if each["in"] == "query"
    ]
    content = told.get("requestBody", {}).get("content", {})
    for kind, body in content.items():
        if kind == "application/json":
            rows += list(_fields(body["schema"], schema))
        elif kind == "multipart/form-data":
            rows += [_row(name, part, False, "") for name, part in body["schema"]["properties"].items()]
    if rows:
        lines += ["| field | type | |\n|---|---|---|\n" + "\n".join(rows) + "\n"]
    return "\n".join(lines)


def _fields(body: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    found = _resolved(body, schema)
    for name, part in found.get("properties", {}).items():
        yield _row(name, part, name in found.get("required", []), part.get("description", ""))


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in part:  # an optional body
        part = next((each for each in part["anyOf"] if "$ref" in each), part)
    if "$ref" not in part:
        return part
    name = part["$ref"].rsplit("/", 1)[1]
    known = schema.get("$defs", {}) | schema.get("components", {}).get("schemas", {})
    found: dict[str, Any] = known[name]
    return found


def _row(name: str, part: dict[str, Any], required: bool, text: str) -> str:
    told = text or part.get("description", "")
    default = part.get("default")
    extra = ["required"] if required else [f"default `{json.dumps(default)}`"]
    shown = told if not required and default in (None, "", [], {}) else "; ".join(filter(None, [told, *extra]))
    return f"| `{name}` | {_type(part)} | {shown} |"


def _type(part: dict[str, Any]) -> str:
    """A schema in a word or two."""
    if "$ref" in part:
        return str(part["$ref"].rsplit("/", 1)[1])
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_type(each) for each in part["anyOf"] if each.get("type") != "null"))
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "const" in part:
        return f"`{part['const']}`"
    if part.get("type") == "array":
        return f"list of {_type(part.get('items', {}))}"
    bounds = [f"{sign} {part[name]:,.12g}" for name, sign in (("minimum", "≥"), ("maximum", "≤")) if name in part]
    bounds += [f"> {part['exclusiveMinimum']:,.12g}"] if "exclusiveMinimum" in part else []
    return " ".join([str(part.get("format") or part.get("type", "any")), *bounds])


def _errors() -> str:
    rows = sorted(
        (STATUS[found], found.code, (found.__doc__ or "").strip().splitlines()[0])
        for found in errors.all_errors()
        if not found.__subclasses__()
    )
    table = "\n".join(f"| {status} | `{code}` | {text} |" for status, code, text in rows)
    return (
        "## Errors\n\n`application/problem+json` with a stable `code`; on OpenAI's and Gemini's routes in theirs, "
        f"with the same code. 429 and most 503 carry `Retry-After`.\n\n| status | code | |\n|---|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    main()
