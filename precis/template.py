"""A model's chat template: compiled in a sandbox, and taken apart around the contents of its messages."""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from precis.errors import InvalidRequest
from precis.wire.messages import Message


def common_start(one: str, other: str) -> str:
    """What two texts begin with alike."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def compiled(template: str) -> jinja2.Template:
    """A template that can reach nothing but its messages."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )

    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> Any:
    """What templates call to reject messages."""
    raise jinja2.TemplateError(message)


def _mark(index: int) -> str:
    return f"\ue000{index}\ue001"


def marks(roles: tuple[str, ...]) -> list[Message]:
    """Messages whose contents are private-use marks, so that the template's own text can be told apart."""
    return [Message(role, _mark(i)) for i, role in enumerate(roles)]


def split(rendered: str, n_marks: int) -> list[str]:
    """The template's text around the marks.

    Raises:
        InvalidRequest: if the template drops, repeats or reorders contents.
    """
    pieces, rest = [], rendered
    for index in range(n_marks):
        before, mark, rest = rest.partition(_mark(index))
        if not mark:
            raise InvalidRequest("the model's chat template leaves a message out")
        pieces.append(before)
    if "\ue000" in rest or any("\ue000" in piece for piece in pieces):
        raise InvalidRequest("the model's chat template repeats a message")
    return [*pieces, rest]
