"""The ceilings of this machine: the speed of copying memory, and of a loopback socket."""

from __future__ import annotations

import socket
import threading
import time

import torch

COPY_ELEMENTS = 32_000_000
SOCKET_BYTES = 256_000_000
SOCKET_CHUNK = 1 << 20


class Memory:
    """Copies 128 MB of float32 in one thread, far more than a cache holds."""

    def __init__(self) -> None:
        self._source, self._target = torch.ones(COPY_ELEMENTS), torch.ones(COPY_ELEMENTS)

    def bytes_per_s(self) -> float:
        """Measure the bytes read plus bytes written per second."""
        began = time.perf_counter()
        self._target.copy_(self._source)
        return 2 * 4 * COPY_ELEMENTS / (time.perf_counter() - began)


def loopback_bytes_per_s() -> float:
    """Measure the payload bytes per second of one TCP connection between two threads on loopback."""
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
