"""What this machine allows: copying memory, and bytes through a loopback socket."""

from __future__ import annotations

import socket
import threading
import time

import torch

COPY_ELEMENTS = 32_000_000
SOCKET_BYTES = 256_000_000
SOCKET_CHUNK = 1 << 20


class Memory:
    """One thread that copies 128 MB of float32, far more than a cache holds."""

    def __init__(self) -> None:
        self._source, self._target = torch.ones(COPY_ELEMENTS), torch.ones(COPY_ELEMENTS)

    def bytes_per_s(self) -> float:
        """Bytes read plus bytes written per second, now."""
        began = time.perf_counter()
        self._target.copy_(self._source)
        return 2 * 4 * COPY_ELEMENTS / (time.perf_counter() - began)


def loopback_bytes_per_s() -> float:
    """Payload bytes per second through one TCP connection of two threads on loopback, now."""
    chunk = memoryview(bytearray(SOCKET_CHUNK))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:

        def send() -> None:
            for _ in range(SOCKET_BYTES // SOCKET_CHUNK):
                sender.sendall(chunk)
            sender.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        taken = memoryview(bytearray(SOCKET_CHUNK))
        began = time.perf_counter()
        thread.start()
        received = 0
        while count := receiver.recv_into(taken):
            received += count
        thread.join()
        return received / (time.perf_counter() - began)
