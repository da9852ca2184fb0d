"""What grows while a soak is on: memory of each process and of the store, and the store's keys."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict

import numpy as np
import psutil
import redis

from precis.wire import keys
from tests.stack import Stack

_SETTLING_S = 20.0  # a process' first seconds: imports, first allocations
_SHORT_LIVED_S = 600.0  # flags and streams of jobs live so long in the store, and there are more and more until then


class Slopes(threading.Thread):
    """Looks once a second until it is stopped."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack, self._over = stack, threading.Event()
        self._seen: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)

    def run(self) -> None:
        while not self._over.wait(1.0):
            now = time.monotonic()
            for name, process in list(self._stack.processes.items()):
                with contextlib.suppress(psutil.Error):
                    used = psutil.Process(process.pid).memory_full_info().uss / 1e6
                    self._seen[f"{name} MB", process.pid].append((now, used))
            with contextlib.suppress(redis.RedisError, OSError):
                client = self._stack.server.client()
                self._seen["store MB", 0].append((now, client.info("memory")["used_memory"] / 1e6))
                found = client.info("keyspace").get("db0", {"keys": 0, "expires": 0})
                forgotten = client.zcard(keys.TOMBSTONES)  # an expired context's record is kept for a day
                self._seen["store keys", 0].append((now, found["keys"] - forgotten))
                self._seen["store keys without an end", 0].append((now, found["keys"] - found["expires"] - forgotten))

    def stop(self) -> None:
        self._over.set()
        self.join(30)

    def told(self) -> list[str]:
        """A line for each: last value, and growth per hour over all processes of a name that lived long enough."""
        lines, by_name = [], defaultdict(list)
        for (name, _), points in self._seen.items():
            longest = (points[-1][0] - points[0][0]) / 2
            settling = min(_SHORT_LIVED_S, longest) if name.startswith("store") else _SETTLING_S
            settled = np.array([point for point in points if point[0] > points[0][0] + settling])
            if len(settled) > 1 and settled[-1, 0] - settled[0, 0] > _SETTLING_S:
                by_name[name].append(settled)
        for name, lives in sorted(by_name.items()):
            seconds = [life[-1, 0] - life[0, 0] for life in lives]
            slopes = [np.polyfit(life[:, 0], life[:, 1], 1)[0] * 3600 for life in lives]
            slope = float(np.average(slopes, weights=seconds))
            lines.append(f"{name}: {lives[-1][-1, 1]:.1f}, {slope:+.1f} per hour over {sum(seconds):.0f} s")
        return lines
