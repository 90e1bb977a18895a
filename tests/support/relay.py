"""A TCP relay on loopback whose network can be cut: silently, as a dead line does, or with resets, as a firewall does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Literal

State = Literal["open", "silent", "reset"]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relay:
    """Accepts from the start; `target` is set before the first client comes. What is under way when the line goes silent arrives when it
    is back, as TCP's repetitions would, though the client may have given it up by then."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.target = 0
        self._passing = threading.Event()
        self._passing.set()
        self._state: State = "open"
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self, how: Literal["silent", "reset"]) -> None:
        self._state = how
        self._passing.clear()
        if how == "reset":
            for end in list(self._sockets):
                _reset(end)
            self._passing.set()

    def heal(self) -> None:
        self._state = "open"
        self._passing.set()

    def close(self) -> None:
        self._state = "reset"
        self._listener.close()
        self.cut("reset")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                if self._state == "reset":
                    _reset(client)
                else:
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._passing.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            return _reset(client)
        self._sockets |= {client, server}
        threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._passing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        self._sockets.discard(source)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        end.close()
