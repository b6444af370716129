"""A server that looks like vLLM to the load generator: streams, counters, a prefix cache.

It computes nothing. Its cache is one of whole blocks, by salt; tokens are read as its model's
tokenizer writes them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class FakeVLLM:
    """What the server does, and what it was asked.

    Args:
        encode: Its tokenizer.
        block_size: Of its cache.
        plugin: Whether it has the counters of the plug-in, and compiles and splices.
        fail: Says of a request how it fails: "status", "event", "cut" or "" for not at all.
        choose: Log-probabilities of choices, from a prompt.
        max_model_len: Of its model.
    """

    encode: Callable[[str], tuple[int, ...]]
    block_size: int = 32
    plugin: bool = True
    fail: Callable[[Body], str] = lambda body: ""
    choose: Callable[[list[int], list[int]], list[float]] = lambda ids, choices: [
        -float(i) for i in range(len(choices))
    ]
    max_model_len: int = 4096
    first_s: float = 0.0
    asked: list[Body] = field(default_factory=list)
    queries: int = 0
    hits: int = 0
    loaded: int = 0
    compiled: list[Body] = field(default_factory=list)
    segments: dict[str, list[int]] = field(default_factory=dict)
    _cache: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve; yields the address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def metrics(self) -> str:
        lines = [
            "# HELP vllm:prefix_cache_queries_total Tokens.",
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0"}} 1.0',
            f'vllm:prefix_cache_queries_total{{engine="0"}} {float(self.queries)}',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}',
        ]
        if self.plugin:
            lines += [
                'kvnotes:plans_total{engine="0"} 0.0',
                f'kvnotes:loaded_tokens_total{{engine="0"}} {float(self.loaded)}',
                f'kvnotes:compiled_total{{engine="0"}} {float(len(self.segments))}',
            ]
        return "\n".join(lines) + "\n"

    def take(self, body: Body) -> None:
        """Count a request, and remember its blocks."""
        ids, salt = body["prompt"], body.get("cache_salt", "")
        params = (body.get("kv_transfer_params") or {}).get("kvnotes") or {}
        with self._lock:
            self.asked.append(body)
            if "compile" in params:
                wish = params["compile"]
                self.segments[wish["name"]] = ids[wish.get("preamble_tokens", 0) :]
                return
            size = self.block_size
            spliced = [self.segments[name] for name in params.get("segments", ())]
            start = stop = None
            for segment in spliced:
                at = next(i for i in range(len(ids)) if ids[i : i + len(segment)] == segment)
                start, stop = at + params["num_seam_tokens"], at + len(segment)
            here = 0
            end = len(ids) - 1 if start is None else start
            while here + size <= end and (salt, tuple(ids[: here + size])) in self._cache:
                here += size
            self.queries += len(ids)
            self.hits += here
            if start is not None and stop is not None:
                self.loaded += stop - start
            reach = len(ids) if start is None else start
            for end in range(size, reach + 1, size):
                self._cache.add((salt, tuple(ids[:end])))


def _handler(fake: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._json({"data": [{"id": "tiny", "max_model_len": fake.max_model_len}]})
            elif self.path == "/metrics":
                self._send(fake.metrics().encode(), "text/plain")
            elif self.path == "/version":
                self._json({"version": "0.0.0"})
            else:
                self._json({}, 200 if self.path == "/health" else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self._json({"tokens": list(fake.encode(body["prompt"]))})
                return
            how = fake.fail(body) if body.get("stream") else ""
            if how == "status":
                self._json({"error": {"message": "no room"}}, 503)
                return
            fake.take(body)
            if not body.get("stream"):
                self._json({"choices": [{"text": "x", "logprobs": _said(fake, body)}]})
                return
            self._stream(body, how)

        def _stream(self, body: Body, how: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            time.sleep(fake.first_s)
            for number in range(body["max_tokens"]):
                if how and number == 1:
                    if how == "event":
                        self._event({"error": {"message": "engine died"}})
                    self.close_connection = True
                    return
                self._event({"choices": [{"text": f" t{number}"}]})
            self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _event(self, data: Body) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()

        def _json(self, data: Body, status: int = 200) -> None:
            self._send(json.dumps(data).encode(), "application/json", status)

        def _send(self, data: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _said(fake: FakeVLLM, body: Body) -> Body | None:
    choices = body.get("logprob_token_ids")
    if not choices:
        return None
    scores = fake.choose(body["prompt"], choices)
    named = {f"token_id:{i}": score for i, score in zip(choices, scores, strict=False)}
    return {"top_logprobs": [named]}
