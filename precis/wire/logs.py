"""One log format for all processes: readable lines, coloured on a terminal, or a JSON object per line."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

Format = Literal["lines", "json"]


def configure(wanted: Format = "lines") -> None:
    """Set up structlog and the standard library's logging; called once, by the process' main function."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    shown: list[Any] = [
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty()),
    ]
    if wanted == "json":
        shown = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, *shown],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
