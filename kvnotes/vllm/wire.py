"""Talking to a server: requests, streams of events, and everything that can go wrong there.

Owns `Server`. Knows HTTP and JSON; no tokens, no sessions. The package httpx is imported when the
first server is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvnotes.errors import EngineError, ServerError

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 5.0
READ_SECONDS = 300.0
"""Longest wait for the next byte: a server says nothing while it computes a long prompt."""

_MAX_REASON = 300
_AGAIN = "nothing of the session is lost: call it again when the server is there"
_LOG = "nothing of the session is lost: call it again; the server's log says more"
_HINTS = {
    400: "the server does not take what was sent: compare its version with docs/vllm-client.md",
    401: "give the key that the server was started with: api_key=...",
    403: "give the key that the server was started with: api_key=...",
    404: "check the URL and the model's name: the server's /v1/models lists what it serves",
    413: "the prompt is too long for the server",
    429: "the server is busy: call it again later; nothing of the session is lost",
}


class Server:
    """A server under one URL.

    Args:
        url: Its address, with or without `/v1` at the end.
        api_key: Sent as a bearer token, "" for none; never part of a message.
        connect_seconds: Longest wait for a connection.
        read_seconds: Longest wait for the next byte of a reply.
        transport: Another way to reach it than the network, for tests.

    Raises:
        EngineError: httpx is not installed, or the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        connect_seconds: float = CONNECT_SECONDS,
        read_seconds: float = READ_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        httpx = _httpx()
        self.url = _address(url)
        self._read_seconds = read_seconds
        if not (api_key.isascii() and api_key.isprintable()):
            raise EngineError(
                "the API key has a character that no header may have",
                hint="was a line end read with it?",
            )
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(read_seconds, connect=connect_seconds),
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise EngineError(
                f"{url!r} is no address of a server: {error}", hint="give http://HOST:PORT"
            ) from error

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def close(self) -> None:
        """Close all connections; what is still computed for them is aborted."""
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON that a path gives."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Return the JSON of the reply to a request.

        Raises:
            ServerError: There is none; the message says what was asked, and what came.
        """
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        what = f"{method} {self.url}{path}"
        with self._explained(what):
            response = self._client.request(method, path, json=body)
        if response.status_code != 200:
            raise _refusal(what, response.status_code, response.content)
        return _json(response.content, what)

    @contextmanager
    def events(self, path: str, body: Mapping[str, object]) -> Iterator[Iterator[Any]]:
        """Send a request and give the events of its reply as they come.

        Leaving the block closes the connection, which aborts what the server still computes.

        Raises:
            ServerError: No reply, or it breaks off.
        """
        what = f"POST {self.url}{path}"
        with self._explained(what), self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise _refusal(what, response.status_code, response.read())
            yield self._events(response.iter_bytes(), what)

    def _events(self, chunks: Iterable[bytes], what: str) -> Iterator[Any]:
        """Yield the events of a reply.

        Lines end with a line feed alone: the JSON in them may hold other characters at which text
        is split into lines.
        """
        rest, chunks = b"", iter(chunks)
        with self._explained(what):
            for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue  # an empty line between events, or a comment to keep it alive
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        with suppress(_httpx().HTTPError):  # the reply is whole
                            list(chunks)  # read to its end, a connection can be used again
                        return
                    event = _json(data, what)
                    if isinstance(event, dict) and event.get("error"):
                        raise ServerError(
                            f"{what}: the server gave up within its reply: {_said(event)}",
                            hint=_LOG,
                        )
                    yield event
        raise ServerError(f"{what}: the reply broke off before its end", hint=_AGAIN)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn what httpx raises into one line that says both sides."""
        httpx = _httpx()
        if self._client.is_closed:
            raise EngineError(f"{what}: the model is closed", hint="connect to it again")
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(
                f"{what}: nobody answers there: {_reason(error)}",
                hint="start the server, or check the address",
            ) from error
        except httpx.TimeoutException as error:
            raise ServerError(
                f"{what}: no answer for {self._read_seconds:g} s",
                hint=f"{_AGAIN}, or wait longer with read_seconds=...",
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(
                f"{what}: the connection broke: {_reason(error)}", hint=_AGAIN
            ) from error


def _address(url: str) -> str:
    """Return the address of a server, as messages may show it."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname
    except ValueError:
        fine = False
    if not fine:
        raise EngineError(f"{url!r} is no address of a server", hint="give http://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise EngineError(
            f"the address of a server at {parts.hostname} has a password, a query or a fragment",
            hint="give http://HOST:PORT, and a key as api_key=...",
        )
    return url.rstrip("/").removesuffix("/v1")


def _json(content: bytes, what: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ServerError(
            f"{what}: the answer is no JSON: {_short(content.decode('utf-8', 'replace'))!r}",
            hint="is this the address of a vLLM server?",
        ) from error


def _refusal(what: str, status: int, content: bytes) -> ServerError:
    try:
        said = _said(json.loads(content))
    except ValueError:
        said = _short(content.decode("utf-8", "replace"))
    return ServerError(
        f"{what}: the server answers {status}: {said}", hint=_HINTS.get(status, _LOG)
    )


def _said(content: Any) -> str:
    """Return the words of an error, as vLLM and gateways write them."""
    found = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return _short(str(found))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def _reason(error: Exception) -> str:
    return _short(str(error)) or type(error).__name__


def _httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise EngineError(
            "sessions over a server need the package httpx, which is not installed",
            hint="pip install 'kvnotes[client]'",
        ) from error
    return httpx
