"""An HTTP server on this machine that serves a folder, and breaks when it is told to."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Literal

Kind = Literal["close", "status", "stall", "shorter", "replace"]

PIECE = 4096
PAUSE = 0.3
"""Seconds before a connection is closed: what was sent before has arrived by then."""


@dataclass(frozen=True)
class Break:
    """What goes wrong with one answer.

    Args:
        kind: `close`: the connection, after some bytes. `status`: an error instead of an answer.
            `stall`: silence after some bytes. `shorter`: a length that is right for what comes,
            which is not all. `replace`: the file gets another content and version before it is
            served.
        after: Bytes of the body that come before.
        status: The error.
        content: What the file holds from then on.
    """

    kind: Kind
    after: int = 0
    status: int = 500
    content: bytes = b""


@dataclass
class State:
    """What the server was asked and told to do; breaks are taken in order, one for each GET."""

    root: Path
    url: str = ""
    breaks: deque[Break] = field(default_factory=deque)
    always: Break | None = None
    head_breaks: deque[Break] = field(default_factory=deque)
    ranges: bool = True
    etags: bool = True
    lengths: bool = True
    num_bytes: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    stop: Event = field(default_factory=Event)

    def gets(self) -> list[str]:
        """The ranges of all GET requests, in order."""
        return [asked for method, _, asked in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._note()
        broken = self.server.state.head_breaks.popleft() if self.server.state.head_breaks else None
        if broken is not None:
            self._fail(broken)
            return
        content = self._content()
        if content is not None:
            self._headers(200, content, 0, len(content))

    def do_GET(self) -> None:
        self._note()
        state = self.server.state
        broken = state.breaks.popleft() if state.breaks else state.always
        if broken is not None and broken.kind == "status":
            self._fail(broken)
            return
        if broken is not None and broken.kind == "replace":
            self._place().write_bytes(broken.content)
            broken = None
        content = self._content()
        if content is None:
            return
        start, stop, status = 0, len(content), 200
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found and state.ranges:
            start = int(found[1])
            stop = min(int(found[2]) + 1 if found[2] else stop, stop)
            status = 206
            if start >= len(content):
                self._fail(Break("status", status=416))
                return
        end = start + broken.after if broken else stop
        self._headers(status, content, start, end if broken and broken.kind == "shorter" else stop)
        for at in range(start, min(end, stop), PIECE):
            piece = content[at : min(at + PIECE, end, stop)]
            self.wfile.write(piece)
            state.num_bytes[self.path] += len(piece)
        if broken is not None and broken.kind == "stall":
            state.stop.wait(60)
        if broken is not None and broken.kind in ("close", "stall"):
            self.wfile.flush()
            time.sleep(PAUSE if broken.after else 0.0)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def do_PUT(self) -> None:
        self._note()
        self._fail(Break("status", status=405))

    do_POST = do_PUT

    def log_message(self, *arguments: object) -> None:
        pass

    def _note(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.state.requests.append((self.command, self.path, asked))

    def _place(self) -> Path:
        return self.server.state.root / self.path.lstrip("/")

    def _content(self) -> bytes | None:
        try:
            return self._place().read_bytes()
        except OSError:
            self._fail(Break("status", status=404))
            return None

    def _fail(self, broken: Break) -> None:
        self.send_response(broken.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _headers(self, status: int, content: bytes, start: int, stop: int) -> None:
        self.send_response(status)
        if self.server.state.lengths:
            self.send_header("Content-Length", str(stop - start))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        if self.server.state.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        if self.server.state.etags:
            self.send_header("ETag", f'"{sha256(content).hexdigest()[:16]}"')
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: State) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state

    def handle_error(self, request: object, address: object) -> None:
        pass  # clients that go away are no news


@contextmanager
def serving(root: Path) -> Iterator[State]:
    """Serve a folder as long as the block lasts."""
    state = State(root)
    server = _Server(state)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def unreachable() -> str:
    """The URL of a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
