"""A real connection to a real server, on which chosen commands go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

FAULTS = ("error", "timeout", "drop reply", "nothing", "truncate", "flip", "swap", "evict")


@dataclass
class Plan:
    """Which command goes wrong, and how.

    Attributes:
        at: the n-th command counted from 0; -1: none.
        fault: of FAULTS; "drop reply" lets the command happen and loses the answer.
        victims: keys that "evict" takes away.
        seen: commands so far.
    """

    at: int = -1
    fault: str = "error"
    victims: str = "*"
    seen: list[str] = field(default_factory=list)


class Faulty(redis.Redis):
    """As redis.Redis, by a plan."""

    plan: Plan = Plan()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Count, and go wrong if it is time."""
        plan, number = self.plan, len(self.plan.seen)
        execute: Any = super().execute_command
        plan.seen.append(str(args[0]))
        if number != plan.at:
            return execute(*args, **options)
        if plan.fault == "error":
            raise redis.ConnectionError("the connection broke")
        if plan.fault == "timeout":
            raise redis.TimeoutError("no answer")
        if plan.fault == "evict":
            for key in list(execute("KEYS", plan.victims)):
                execute("UNLINK", key)
        found = execute(*args, **options)
        if plan.fault == "drop reply":
            raise redis.TimeoutError("the answer was lost")
        return damaged(found, plan.fault) if plan.fault in _DAMAGE else found


_DAMAGE: dict[str, Callable[[bytes], Any]] = {
    "nothing": lambda data: None,
    "truncate": lambda data: data[: len(data) // 2],
    "flip": lambda data: bytes([*data[:-1], data[-1] ^ 1]) if data else data,
    "swap": lambda data: data[::-1],
}


def damaged(found: Any, fault: str) -> Any:
    """A reply that is not what was stored; counts and flags stay."""
    return _DAMAGE[fault](found) if isinstance(found, bytes) else found


def faulty(url: str, plan: Plan) -> Faulty:
    """A client by a plan."""
    client: Any = Faulty.from_url(url, socket_timeout=10)
    client.plan = plan
    made: Faulty = client
    return made
