"""Just enough HTTP/2, by hand, to begin a call of gRPC and not to end it: a library sends and reads whole messages."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
FIRST_WINDOW = 65_535
FRAME_MAX = 16_384
CALL = "/diloco.v1.ParameterServer/"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


class HalfCall:
    """A connection with one call. It sends as much as the shard's windows allow, and takes no byte unless asked to."""

    def __init__(self, address: str, method: str, metadata: Sequence[tuple[str, str]], service: str = CALL) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=120)
        self._windows = {0: FIRST_WINDOW, 1: FIRST_WINDOW}
        self._initial = FIRST_WINDOW
        self._read = b""
        self.sent = 0
        """Bytes of messages."""
        self.is_over = False
        """The shard has answered, or closed the connection."""
        pairs = [
            (":method", "POST"), (":scheme", "http"), (":path", service + method), (":authority", "x"),
            ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
        ]  # fmt: skip
        block = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in pairs)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block))

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

    def listen(self) -> None:
        """Read what has come, without waiting; grant nothing for it."""
        while not self.is_over and select.select([self._socket], [], [], 0)[0]:
            try:
                data = self._socket.recv(1 << 16)
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

    def _hear(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        match kind:
            case 8 if stream in self._windows:  # WINDOW_UPDATE
                self._windows[stream] += int.from_bytes(body, "big")
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

    def _send(self, data: bytes) -> None:
        for window in self._windows:
            self._windows[window] -= len(data)
        self._write(frame(DATA, 0, 1, data))

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_over = True
