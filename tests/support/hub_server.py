"""A hub of one folder on this machine, which counts what is fetched from it: for tests that must fetch little."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as those of a repo."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        #: file -> how many bytes of it were sent
        self.sent: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}"):
            self._send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode(), body=body, name="")
            return
        _, found, rest = path.partition(f"/{REPO}/resolve/")
        name = rest.partition("/")[2]
        file = self.server.folder / name
        if not found or not name or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(file.read_bytes(), body=body, name=name)

    def _send(self, content: bytes, *, body: bool, name: str) -> None:
        asked = self.headers.get("Range")
        part, total = content, len(content)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else total]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{total}")
        self.end_headers()
        if body:
            self.wfile.write(part)
            self.server.sent[name] = self.server.sent.get(name, 0) + len(part)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub while the block runs."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
