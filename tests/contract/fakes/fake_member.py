"""What the stand-ins for a shard and a worker share: they serve a /status and end on SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from diloco_common.wire.addresses import Role, write_address


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?")
    for name in ("settings", "address-file", "final-status", "shards", "export", "out", "progress"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    args.set = dict(one.split("=", 1) for one in args.set)
    return args


class Member:
    """Serves `status`; `answered` counts who asked, `terminated` is set by SIGTERM."""

    def __init__(self, http: str, status: dict[str, Any]) -> None:
        self.status = status
        self.answered = threading.Semaphore(0)
        self.terminated = threading.Event()
        # In a thread of its own: the main thread may hold the lock of the event.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=self.terminated.set).start())
        member = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(member.status).encode())
                member.answered.release()

            def log_message(self, *_: object) -> None:
                pass

        host, port = http.split(":")
        self.server = ThreadingHTTPServer((host, int(port)), Handler)
        self.http = f"{host}:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say_where(self, path: str, role: Role, name: str) -> None:
        write_address(Path(path), role, name, grpc=f"{self.http}1" if role == "shard" else "", http=self.http)
