"""Inference servers are told of whole folders, as vLLM and SGLang want to be told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco_common.errors import ConfigError
from diloco_deploy.checkpoint.work import TRIES, Notified

FOLDER = Path("/models/version-000012")
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
INIT, DISK = "/init_weight_transfer_engine", "/update_weights_from_disk"
TRANSFER = [START, UPDATE, FINISH]


class Server:
    """Answers each path as it is told, in turn, and then well."""

    def __init__(self, answers: dict[str, list[tuple[int, Any]]]) -> None:
        self.answers, self.asked, self.bodies = answers, list[str](), list[Any]()
        self.is_open = False
        """A transfer is under way: no other may begin, and none goes on without it."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(path)
        self.bodies.append(body)
        if waiting := self.answers.get(path):
            return waiting.pop(0)
        if path in TRANSFER and self.is_open == (path == START):
            return 500, {"detail": "out of turn"}
        if path in (START, FINISH):
            self.is_open = path == START
        return 200, {"success": True, "message": "ok"}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = server.answer(self.path, body)
            if not status:
                self.connection.close()
                return
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.mark.parametrize(
    ("kind", "answers", "asked", "taken"),
    [
        ("sglang", {}, [DISK], True),
        ("sglang", {DISK: [(503, "busy"), (429, "later")]}, [DISK] * 3, True),
        ("sglang", {DISK: [(400, {"success": False, "message": "no such path"})]}, [DISK], False),
        ("sglang", {DISK: [(200, {"success": False, "message": "no such path"})]}, [DISK], False),
        ("sglang", {DISK: [(200, b"no JSON")]}, [DISK], True),
        ("sglang", {DISK: [(500, "broken")] * TRIES}, [DISK] * TRIES, False),
        ("sglang", {DISK: [(0, "")] * TRIES}, [DISK] * TRIES, False),
        ("vllm", {}, [INIT, *TRANSFER], True),
        ("vllm", {UPDATE: [(503, "busy")]}, [INIT, START, UPDATE, UPDATE, FINISH], True),
        ("vllm", {UPDATE: [(400, {"detail": "no such backend"})]}, [INIT, *TRANSFER], False),
        ("vllm", {INIT: [(404, {"detail": "Not Found"})]}, [INIT], False),
        ("vllm", {START: [(400, {"detail": "paused"})]}, [INIT, START], False),
    ],
)
def test_a_server_hears_of_a_folder(kind: str, answers: Any, asked: list[str], taken: bool) -> None:
    server, waits = Server(answers), list[float]()
    with serving(server) as url:
        notified = Notified(f"{kind}+{url}", waits.append)
        said = notified.tell(FOLDER)
        assert server.asked == asked
        assert ("has taken version-000012" in said) is taken
        assert not server.is_open
        assert waits == [2.0**i for i in range(len(waits))]
        server.asked.clear()
        assert "has taken" in notified.tell(FOLDER), "the next one is told, whatever became of this one"
        assert server.asked == ([DISK] if kind == "sglang" else TRANSFER if taken else [INIT, *TRANSFER])
    path = (
        {"model_path": str(FOLDER), "flush_cache": True} if kind == "sglang" else {"update_info": {"path": str(FOLDER)}}
    )
    assert path in server.bodies


@pytest.mark.parametrize("url", ["http://a:1", "vllm+a:1", "vllm+ftp://a", "sglang+http://", "other+http://a:1", ""])
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--notify"):
        Notified(url)
