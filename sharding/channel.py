"""A connection between two processes that carries one JSON value a line, and where it is made."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import InputError, shown

__all__ = ["GRACE", "Address", "Channel", "parse_address"]

GRACE = 2.0  # seconds beyond a bound in which an answer may still come
_LONGEST = 1 << 26  # bytes of one message; who sends more isn't one of ours


class Address(NamedTuple):
    """Where process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse 'host:port', or '[ip6]:port'. Errors: InputError that shows the form."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"address={shown(text)}; wanted HOST:PORT of process 0, for example 10.0.0.1:1235.")
    return Address(host, int(port))


class Channel:
    """A connection that carries one JSON value a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, bytearray()
        self._whole: deque[dict[str, Any]] = deque()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that vanishes closes nothing: after 25 seconds without an answer it counts as gone.
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Errors: OSError when the other end is gone."""
        self._socket.settimeout(GRACE)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self, deadline: float) -> dict[str, Any]:
        """Return the next message, whole by `deadline`. Errors as receive's."""
        while not self._whole:
            self._fill(deadline - time.monotonic())
        return self._whole.popleft()

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes, and return the messages that are whole now.

        Errors: OSError when the other end is gone or silent; ValueError for what isn't a message.
        """
        self._fill(GRACE)
        return self.left()

    def left(self) -> list[dict[str, Any]]:
        """Messages that came with those that were read."""
        messages = list(self._whole)
        self._whole.clear()
        return messages

    def _fill(self, timeout: float) -> None:
        self._socket.settimeout(max(timeout, 0.001))
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("connection closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _LONGEST:
            raise ValueError("a message without an end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(m, dict) for m in messages):
            raise ValueError("not a message of attnops")
        self._whole.extend(messages)

    def close(self) -> None:
        self._socket.close()
