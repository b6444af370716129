"""Tokens as a server generates them.

Owns `ServedStream`: one streaming request. Closing it closes the connection, and the server aborts
what it still computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

from kvnotes.engine.base import Stopwatch
from kvnotes.engine.exchange import Exchange, Served
from kvnotes.errors import ServerError
from kvnotes.plan import Run
from kvnotes.segment import KVCache
from kvnotes.vllm import bodies
from kvnotes.vllm.wire import Server

ENDED_EARLY = "the reply was ended here, before the server said what it had cached"


class ServedStream:
    """Generated token ids; nothing is asked for before the first. Iterate it once.

    The server has not fed the last token back: the next turn computes it.

    Args:
        server: Where it is generated.
        body: The request.
        cache: Cache of the prompt, with room for all new tokens behind it.
        exchange: Takes note of what the server says.
        limit: Most tokens.
        stop_ids: Tokens that end it.
        first: Called before the request is sent.
    """

    def __init__(
        self,
        server: Server,
        body: Mapping[str, object],
        cache: KVCache,
        exchange: Exchange,
        *,
        limit: int,
        stop_ids: frozenset[int],
        first: Callable[[], None],
    ) -> None:
        self._server = server
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._cache = cache
        self._exchange = exchange
        self._limit = limit
        self._stop_ids = stop_ids
        self._first = first
        self._ids: list[int] = []
        self._waiting: deque[int] = deque()
        self._events: Iterator[Any] | None = None
        self._open = ExitStack()
        self._closed = False
        self._reason: str | None = None
        self._tells = False  # it is the first request about the prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens yielded so far, the stop token included."""
        return tuple(self._ids)

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and all generated tokens that were fed back (not the last)."""
        fed = tuple(self._ids[:-1])
        if not fed:
            return self._cache
        run = Run(fed, self._cache.length, self._cache.canonical_layout)
        return self._cache.appended(run, self._cache.end)

    def __iter__(self) -> Iterator[int]:
        try:
            while (token_id := self.next_id()) is not None:
                yield token_id
        finally:
            self.close()

    def open(self) -> None:
        """Send the request, if that was not done."""
        if self._events is None and not self._closed:
            self._first()
            self._watch = Stopwatch()
            self._tells = self._exchange.served is None
            self._events = self._open.enter_context(self._server.events(bodies.PATH, self._body))

    def next_id(self) -> int | None:
        """Return the next token, or None at the end.

        Raises:
            ServerError: No reply, or it breaks off.
        """
        self.open()
        while self._events is not None and not self._closed:
            if self._waiting:
                self._ids.append(self._waiting.popleft())
                return self._ids[-1]
            event = next(self._events, None)
            if event is None:
                self._end()
            else:
                self._take(event)
        return None

    def close(self) -> None:
        """End it: no further token comes, and the server stops."""
        if self._closed:
            return
        self._closed = True
        self._open.close()
        served = self._exchange.served
        if self._tells and served is not None and served.num_cached_tokens is None:
            self._exchange.note(ENDED_EARLY if self._reason is None else bodies.NOT_TOLD)

    def _take(self, event: Mapping[str, Any]) -> None:
        for choice in event.get("choices") or ():
            ids = bodies.token_ids(choice)
            if ids and self._exchange.served is None:
                self._exchange.told_at = perf_counter()
                self._exchange.served = Served(self._watch.elapsed_ms)
            self._waiting.extend(ids)
            self._reason = choice.get("finish_reason") or self._reason
        cached = bodies.num_cached(event)
        if self._tells and self._exchange.served is not None and cached is not None:
            self._exchange.served = replace(self._exchange.served, num_cached_tokens=cached)

    def _end(self) -> None:
        """Close it where the server has: the reply is whole."""
        number, reason = len(self._ids), self._reason
        self.close()
        if not number or reason not in ("stop", "length"):
            raise ServerError(
                f"{self._limit} tokens were asked for, the server ended its reply after {number} "
                f"with the reason {reason!r}",
                hint="nothing of the session is lost: call it again; the server's log says more",
            )
        if reason == "length" and number < self._limit:
            self._exchange.note(
                f"the server ended the reply after {number} of {self._limit} tokens"
            )
        elif reason == "stop" and self._ids[-1] not in self._stop_ids:
            self._exchange.note("the server ended the reply by a stop token of its own")
