"""Just enough HTTP/2, by hand, to begin a call of gRPC and never end it.

A library would send whole messages only. This sends what fits into the windows that the server grants, as RFC 9113 asks
for: a server that reads little gets little.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 65_535
FRAME_MAX = 16_384


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def header_block(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Literal fields without indexing (RFC 7541, 6.2.2); names and values of up to 126 bytes."""
    return b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in pairs)


class HalfCall:
    """A connection with one call, whose message is as long as announced and never ends."""

    def __init__(
        self, address: str, path: str, metadata: list[tuple[str, str]], announced: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        """`announced`: bytes of the message that is begun. `tls`: None for plaintext. Raises OSError."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30.0)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket)
        self.frames = 0
        """That the server sent; none: it never spoke HTTP/2 to this caller."""
        self.sent = 0
        """Bytes of the message."""
        self.ended = False
        """The server has closed the connection or the call, or answered it."""
        self._announced = announced
        self._windows = {0: INITIAL_WINDOW, 1: INITIAL_WINDOW}
        self._initial = INITIAL_WINDOW
        self._read = b""
        pairs = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"shard"),
            (b"te", b"trailers"), (b"content-type", b"application/grpc"),
            *((key.encode(), value.encode()) for key, value in metadata),
        ]  # fmt: skip
        begin = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, header_block(pairs))
        self._send(begin)
        self._data(b"\0" + struct.pack(">I", announced))

    def pour(self, over: Callable[[], bool]) -> None:
        """Send all but the last byte of the message, as fast as it is taken."""
        part = bytes(FRAME_MAX)
        while not over() and not self.ended and self.sent < self._announced - 1:
            size = min(self._windows[0], self._windows[1], FRAME_MAX, self._announced - 1 - self.sent)
            if size > 0:
                self._data(part[:size])
                self.sent += size
            self._take_in(0.2 if size <= 0 else 0.0)

    def hold(self, over: Callable[[], bool]) -> None:
        """Keep it open, and answer pings."""
        while not over() and not self.ended:
            self._take_in(0.2)

    def close(self) -> None:
        self.socket.close()

    def _data(self, body: bytes) -> None:
        self._windows[0] -= len(body)
        self._windows[1] -= len(body)
        self._send(frame(DATA, 0, 1, body))

    def _send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.ended = True

    def _take_in(self, wait_s: float) -> None:
        """Read the frames that have come."""
        is_held_back = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
        if not is_held_back and not select.select([self.socket], [], [], wait_s)[0]:
            return
        try:
            more = self.socket.recv(1 << 16)
        except TimeoutError:  # what had come was TLS's own
            return
        except OSError:
            more = b""
        self.ended = self.ended or not more
        self._read += more
        while len(self._read) >= 9:
            size = int.from_bytes(self._read[:3], "big")
            if len(self._read) < 9 + size:
                return
            kind, flags = self._read[3], self._read[4]
            stream = int.from_bytes(self._read[5:9], "big") & 0x7FFFFFFF
            body, self._read = self._read[9 : 9 + size], self._read[9 + size :]
            self._heard(kind, flags, stream, body)

    def _heard(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        self.frames += 1
        match kind:
            case 8:  # WINDOW_UPDATE
                if stream in self._windows:
                    self._windows[stream] += int.from_bytes(body[:4], "big") & 0x7FFFFFFF
            case 4 if not flags & ACK:  # SETTINGS
                for at in range(0, len(body), 6):
                    name, value = struct.unpack(">HI", body[at : at + 6])
                    if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                        self._windows[1] += value - self._initial
                        self._initial = value
                self._send(frame(SETTINGS, ACK, 0))
            case 6 if not flags & ACK:  # PING
                self._send(frame(PING, ACK, 0, body))
            case 3 | 7:  # RST_STREAM, GOAWAY
                self.ended = True
            case 1 if flags & END_STREAM:  # HEADERS: trailers
                self.ended = True
