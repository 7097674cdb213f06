"""A model hub over HTTP for tests: one model, whose files come as slowly as the test says.

It answers what `huggingface_hub` asks: the files of a model, their ETags, and their contents. `num_gets` counts the
downloads of each file, `starts` has the byte at which each began, and `gate` holds the largest one back in its middle
until it is set.
"""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import time

from waiting import PATIENT_S

COMMIT = "1" * 40
_PIECES = 40


class ThrottledHub:
    """Serves the files of a directory as the model `org/slow`, each piece of the largest after `piece_s` seconds."""

    def __init__(self, directory: pathlib.Path, piece_s: float) -> None:
        self.contents = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.largest = max(self.contents, key=lambda name: len(self.contents[name]))
        self.piece_s = piece_s
        self.gate = threading.Event()
        self.num_gets: dict[str, int] = {}
        self.starts: dict[str, list[int]] = {}
        handler = type("_Handler", (_HubHandler,), {"hub": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "ThrottledHub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def environ(self, home: pathlib.Path) -> dict[str, str]:
        """Return the variables of a process that uses this hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ETAG_TIMEOUT": str(int(PATIENT_S)),
        }


class _HubHandler(http.server.BaseHTTPRequestHandler):
    hub: ThrottledHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.path.startswith("/api/models/org/slow"):
            sizes = {key: len(content) for key, content in self.hub.contents.items()}
            answer: object = [
                {"type": "file", "path": key, "size": size, "oid": COMMIT}
                for key, size in sizes.items()
            ]
            if "/tree/" not in self.path:
                files = [{"rfilename": key, "size": size} for key, size in sizes.items()]
                answer = {"id": "org/slow", "sha": COMMIT, "siblings": files}
            body = json.dumps(answer).encode()
            self._send_head(200, body)
            self.wfile.write(body)
            return
        content = self.hub.contents.get(name)
        if content is None or "/org/slow/resolve/" not in self.path:
            self._send_head(404, b"")
            return
        tag = hashlib.sha256(content).hexdigest()
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send_head(206 if start else 200, content, headers)
        if not is_head:
            self.hub.num_gets[name] = self.hub.num_gets.get(name, 0) + 1
            self.hub.starts.setdefault(name, []).append(start)
            self._send_slowly(content, is_slow=name == self.hub.largest)

    def _send_head(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send_slowly(self, content: bytes, *, is_slow: bool) -> None:
        size = len(content) if not is_slow else -(-len(content) // _PIECES)
        with contextlib.suppress(OSError):  # the client has gone
            for number, start in enumerate(range(0, len(content), size)):
                self.wfile.write(content[start : start + size])
                if is_slow:
                    time.sleep(self.hub.piece_s)  # the throttle itself
                    if number == _PIECES // 2:
                        self.hub.gate.wait()

    def log_message(self, *args: object) -> None:
        """Log nothing."""
