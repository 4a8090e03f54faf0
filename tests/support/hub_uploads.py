"""A hub on this machine that takes uploads: for `push_to_hub`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload of small files to `me/mine` takes, and their download."""

    requests: list[tuple[str, Any]]
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        answer: Any = {}
        if self.path.endswith("/repos/create"):
            answer = {"url": f"http://{self.headers['Host']}/me/mine", "name": "me/mine", "id": "me/mine"}
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {
                "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/1",
                "commitOid": "1" * 40,
                "hookOutput": "",
            }
        self.requests.append((self.path, body))
        self._send(json.dumps(answer).encode())

    def do_HEAD(self) -> None:
        self._send(self.files[self.path.rpartition("/")[2]], with_body=False)

    def do_GET(self) -> None:
        self._send(self.files[self.path.rpartition("/")[2]])

    def _send(self, body: bytes, *, with_body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def taking_uploads(cache: Path) -> Iterator[type[Hub]]:
    """Within, the hub is a server of this machine, and what is fetched from it goes into `cache`."""

    class Here(Hub):
        requests, files = [], {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    here = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
    }
    try:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in here.items():
                patched.setattr(constants, name, value)
            yield Here
    finally:
        server.shutdown()
        server.server_close()
