"""Just enough HTTP/2, by hand, to begin a call of gRPC and never end it.

A library would send whole messages only. This sends what fits into the windows that the server grants, as RFC 9113 asks
for: a server that reads little gets little.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 65_535
FRAME_MAX = 16_384
CALL = "/diloco.v1.ParameterServer/"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def header_block(*pairs: tuple[str, str | bytes]) -> bytes:
    """Literal fields without indexing (RFC 7541, 6.2.2), whatever they hold; names and values of up to 126 bytes."""
    fields = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in pairs]
    return b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields)


def call_headers(path: str, *metadata: tuple[str, str | bytes]) -> bytes:
    """The frame that begins a call of gRPC, on stream 1."""
    usual = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "shard", "te": "trailers"}
    block = header_block(*usual.items(), ("content-type", "application/grpc"), *metadata)
    return frame(HEADERS, END_HEADERS, 1, block)


class HalfCall:
    """A connection with one call. It sends as much as the shard's windows allow, and takes no byte unless asked to."""

    def __init__(
        self, address: str, path: str, metadata: Sequence[tuple[str, str]], tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls`: None for plaintext. Raises OSError."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30.0)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket)
        self.frames = 0
        """That the server sent; none: it never spoke HTTP/2 to this caller."""
        self.sent = 0
        """Bytes of messages."""
        self.is_over = False
        """The server has closed the connection or the call, or answered it."""
        self._windows = {0: INITIAL_WINDOW, 1: INITIAL_WINDOW}
        self._initial = INITIAL_WINDOW
        self._read = b""
        self._write(PREFACE + frame(SETTINGS, 0, 0) + call_headers(path, *metadata))

    def begin_message(self, num_bytes: int) -> None:
        self._send(b"\0" + struct.pack(">I", num_bytes))

    def pour(self, num_bytes: int) -> int:
        """Send up to so many bytes of a message, as far as the windows allow. Returns how many it were."""
        self.listen()
        size = 0 if self.is_over else max(0, min(num_bytes, FRAME_MAX, *self._windows.values()))
        if size:
            self._send(bytes(size))
            self.sent += size
        return size

    def listen(self, wait_s: float = 0.0) -> None:
        """Read what has come, and wait so long for the first of it; grant nothing for it."""
        while not self.is_over and (self._is_held_back() or select.select([self._socket], [], [], wait_s)[0]):
            wait_s = 0.0
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:  # what had come was TLS's own
                return
            except OSError:
                data = b""
            self.is_over = not data
            self._read += data
            while len(self._read) >= 9 and len(self._read) >= 9 + int.from_bytes(self._read[:3], "big"):
                size, kind, flags = int.from_bytes(self._read[:3], "big"), self._read[3], self._read[4]
                stream = int.from_bytes(self._read[5:9], "big") & 0x7FFFFFFF
                body, self._read = self._read[9 : 9 + size], self._read[9 + size :]
                self._hear(kind, flags, stream, body)

    def close(self) -> None:
        self._socket.close()

    def _is_held_back(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _hear(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        self.frames += 1
        match kind:
            case 8 if stream in self._windows:  # WINDOW_UPDATE
                self._windows[stream] += int.from_bytes(body[:4], "big") & 0x7FFFFFFF
            case 4 if not flags & ACK:  # SETTINGS
                for at in range(0, len(body), 6):
                    name, value = struct.unpack(">HI", body[at : at + 6])
                    if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                        self._windows[1] += value - self._initial
                        self._initial = value
                self._write(frame(SETTINGS, ACK, 0))
            case 6 if not flags & ACK:  # PING
                self._write(frame(PING, ACK, 0, body))
            case 3 | 7:  # RST_STREAM, GOAWAY
                self.is_over = True
            case 1 if flags & END_STREAM:  # HEADERS: trailers
                self.is_over = True

    def _send(self, data: bytes) -> None:
        for window in self._windows:
            self._windows[window] -= len(data)
        self._write(frame(DATA, 0, 1, data))

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_over = True
