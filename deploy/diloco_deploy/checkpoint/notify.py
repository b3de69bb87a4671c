"""Tells inference servers about a new model folder, since they watch none.

SGLang needs one call, `POST /update_weights_from_disk`. vLLM needs a weight transfer of four: once
`/init_weight_transfer_engine`, and per version `/start_weight_update`, `/update_weights` and `/finish_weight_update`.
Its backend must be one that reads files; it gets the folder as `path`. A folder must have the same path where the
server runs.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diloco_common.errors import ConfigError, plain
from diloco_common.wire.addresses import is_loopback

CALL_S = 300.0
"""Seconds for one call: a server loads the weights before it answers."""
TRIES, WAIT_S = 5, 1.0
"""Attempts for a call without an answer, or with 429 or 5xx; and the first wait between them, which doubles."""
ANSWER_MAX = 1 << 16


class Refused(Exception):
    """A server refused, or did not answer; the message says which."""


class Notified:
    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """`url`: vllm+http://HOST:PORT or sglang+http://HOST:PORT (or https). Raises ConfigError."""
        kind, _, self.address = url.partition("+")
        parts = urlsplit(self.address)
        if kind not in ("vllm", "sglang") or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--notify {url}: give vllm+http://HOST:PORT or sglang+http://HOST:PORT")
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(parts.hostname) else []
        self._opener = urllib.request.build_opener(*handlers)
        self._is_vllm, self._is_initialised = kind == "vllm", False
        self._sleep = sleep

    def tell(self, folder: Path) -> str:
        """Tell the server that this folder is complete. Returns the result in words. Later folders are announced even
        if it fails."""
        try:
            if self._is_vllm:
                self._transfer(folder)
            else:
                answer = self._call("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
                if answer.get("success") is False:
                    raise Refused(plain(str(answer.get("message"))))
        except Refused as refused:
            self._is_initialised = False  # it may be a new process by now
            return f"{self.address} did not take {folder.name}: {refused}"
        return f"{self.address} has taken {folder.name}"

    def _transfer(self, folder: Path) -> None:
        if not self._is_initialised:
            self._call("/init_weight_transfer_engine", {"init_info": {}})
            self._is_initialised = True
        self._call("/start_weight_update", {"is_checkpoint_format": True})
        try:
            self._call("/update_weights", {"update_info": {"path": str(folder)}})
        finally:
            self._call("/finish_weight_update", {})  # even after a refusal: until then it serves no one

    def _call(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises Refused."""
        for attempt in range(TRIES):
            request = urllib.request.Request(
                self.address.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with self._opener.open(request, timeout=CALL_S) as answer:
                    return _json(answer.read(ANSWER_MAX))
            except urllib.error.HTTPError as error:
                why = f"{path} {error.code}: {plain(error.read(ANSWER_MAX).decode(errors='replace'))[:200]}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, HTTPException) as error:
                why = f"{path}: {plain(str(error))}"
            if attempt + 1 < TRIES:
                self._sleep(WAIT_S * 2**attempt)
        raise Refused(why)


def _json(data: bytes) -> Mapping[str, Any]:
    """The JSON object of an answer; empty if it is not an object."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
