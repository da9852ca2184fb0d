"""A TCP proxy on loopback that can hold or refuse everything: a network that splits, and heals."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Literal

Mode = Literal["pass", "hold", "refuse"]


class Proxy:
    """Forwards to a port of loopback; `mode` may be changed at any time.

    pass: as if it were not there. hold: connections stay, nothing moves, as when a cable is pulled. refuse: all
    connections break, and new ones break at once.
    """

    def __init__(self, port: int) -> None:
        self.mode: Mode = "pass"
        self._target, self._closing = port, threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._closing.set()
        self._listening.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        self._listening.settimeout(0.1)
        while not self._closing.is_set():
            try:
                client, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._forward, args=(client,), daemon=True))
            self._threads[-1].start()

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), selectors.DefaultSelector() as ready:
            server = socket.create_connection(("127.0.0.1", self._target))
            with server:
                ready.register(client, selectors.EVENT_READ, server)
                ready.register(server, selectors.EVENT_READ, client)
                while not self._closing.is_set() and self.mode != "refuse":
                    if self.mode == "hold":
                        self._closing.wait(0.02)
                        continue
                    for key, _ in ready.select(0.05):
                        source: socket.socket = key.fileobj  # type: ignore[assignment]
                        if not (data := source.recv(1 << 16)):
                            return
                        key.data.sendall(data)
