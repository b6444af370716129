"""What can go wrong between a session and a server: one clear line, and nothing is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_served import URL, FakeVLLM, fake, tokenizer_folder

from kvnotes import SamplingParams, Session, generate_together
from kvnotes.errors import EngineError, ServerError
from kvnotes.vllm import connect
from kvnotes.vllm.wire import Server

FEW = SamplingParams(max_new_tokens=5)
KEY = "sk-secret-4711"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tiny"))


def raises(error: Exception) -> Callable[[httpx.Request], httpx.Response | None]:
    def fail(request: httpx.Request) -> httpx.Response | None:
        raise error

    return fail


def answers(status: int, **content: Any) -> Callable[[httpx.Request], httpx.Response | None]:
    return lambda request: httpx.Response(status, **content)


def events(*lines: bytes) -> Callable[[httpx.Request], httpx.Response | None]:
    def pieces() -> Iterator[bytes]:
        yield from lines

    return lambda request: httpx.Response(200, content=pieces())


ONE = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [17]}]}\n\n'

FAULTS = {
    "refused": (raises(httpx.ConnectError("[Errno 111] refused")), "nobody answers there: .*111"),
    "connect": (raises(httpx.ConnectTimeout("")), "nobody answers there: ConnectTimeout"),
    "timeout": (raises(httpx.ReadTimeout("slow")), "no answer for 300 s"),
    "restart": (
        raises(httpx.RemoteProtocolError("Server disconnected without sending a response.")),
        "the connection broke: Server disconnected",
    ),
    "400": (answers(400, json={"error": {"message": "top_k too\n high"}}), "400: top_k too high"),
    "401": (answers(401, json={"error": "Unauthorized"}), "answers 401: Unauthorized"),
    "404": (answers(404, json={"detail": "Not Found"}), "answers 404: Not Found"),
    "429": (answers(429, text="slow down"), "answers 429: slow down"),
    "500": (answers(500, json={"object": "error", "message": "engine died"}), "500: engine died"),
    "502": (answers(502, text="<html>" + "bad gateway " * 99), r"502: <html>bad gateway.*\.\.\."),
    "redirect": (answers(307, headers={"location": "/x"}), "answers 307"),
}
"""Name to the fault and what the message says, for every kind of request."""

STREAM_FAULTS = {
    "cut": (events(ONE), "the reply broke off before its end"),
    "cut in a line": (events(ONE, b'data: {"cho'), "the reply broke off before its end"),
    "gives up": (
        events(ONE, b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'),
        "gave up within its reply: EngineCore died",
    ),
    "no end": (events(ONE, b"data: [DONE]\n\n"), "after 1 with the reason None"),
    "nothing": (events(b"data: [DONE]\n\n"), "after 0 with the reason None"),
    "aborted": (
        events(
            b'data: {"choices": [{"token_ids": [17], "finish_reason": "abort"}]}\n\n',
            b"data: [DONE]\n\n",
        ),
        "after 1 with the reason 'abort'",
    ),
    "no JSON": (events(b"data: <html>\n\n"), "the answer is no JSON: '<html>'"),
    "text alone": (
        events(b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n"),
        "the server answers with text alone",
    ),
    "odd ids": (
        events(b'data: {"choices": [{"token_ids": ["x"]}]}\n\n', b"data: [DONE]\n\n"),
        r"the server answers with \['x'\]",
    ),
}

REPLY_FAULTS = {
    "no JSON": (answers(200, text="<html>hello"), "the answer is no JSON: '<html>hello'"),
    "a list": (answers(200, json=[1]), r"1 prompts are sent, the server answers with \[1\]"),
    "no choice": (answers(200, json={"choices": []}), "1 prompts are sent"),
}


def talk(server: FakeVLLM, folder: Path) -> Session:
    session = Session(
        server.connect(folder),
        messages=[{"role": "system", "content": "You help. status: {{status}}\n"}],
        fields={"status": "low"},
    )
    session.user("Is it low?", generate=FEW)
    session.edit(status="high")
    return session


def check_undone(
    session: Session, call: Callable[[Session], object], server: FakeVLLM, says: str
) -> None:
    """A call fails with one clear line; the same call again gives what a first one gives."""
    fault, server.fail = server.fail, None
    reference = session.fork()
    wanted = call(reference)
    prompts, messages = len(server.prompts), session.messages
    server.fail = fault
    with pytest.raises(ServerError, match=says) as caught:
        call(session)
    assert caught.value.hint and "\n" not in caught.value.message
    assert session.messages == messages and session.values["status"] == "high"
    server.fail = None
    assert _said(call(session)) == _said(wanted)
    assert server.prompts[-1] == server.prompts[prompts - 1]
    assert [m.content for m in session.messages] == [m.content for m in reference.messages]


def _said(turn: Any) -> Any:
    return (turn.text, turn.token_ids, turn.decision, turn.plan.token_ids, turn.strategy)


def generated(session: Session) -> object:
    return session.user("And now?", generate=FEW)


def decided(session: Session) -> object:
    return session.user("And now?", decide=["yes", "no"])


@pytest.mark.parametrize("call", [generated, decided])
@pytest.mark.parametrize("name", FAULTS)
def test_a_turn_that_fails_is_undone_and_the_next_try_works(
    name: str, call: Callable[[Session], object], folder: Path
) -> None:
    server = fake()
    session = talk(server, folder)
    server.fail, says = FAULTS[name]
    check_undone(session, call, server, says)


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_a_stream_that_breaks_is_undone_and_the_next_try_works(name: str, folder: Path) -> None:
    server = fake()
    session = talk(server, folder)
    server.fail, says = STREAM_FAULTS[name]
    check_undone(session, generated, server, says)


@pytest.mark.parametrize("name", REPLY_FAULTS)
def test_a_reply_that_is_none_is_undone_and_the_next_try_works(name: str, folder: Path) -> None:
    server = fake()
    session = talk(server, folder)
    server.fail, says = REPLY_FAULTS[name]
    check_undone(session, decided, server, says)


def test_what_was_streamed_before_a_break_is_taken_back(folder: Path) -> None:
    server = fake()
    session = talk(server, folder)
    session.user("And now?")
    before = session.messages
    server.cut_after = 12
    stream, pieces = session.stream(SamplingParams(40)), []
    with pytest.raises(ServerError, match="the connection broke: peer closed"):
        pieces.extend(iter(stream))
    server.cut_after = None
    assert session.messages == before
    whole = "".join(session.stream(SamplingParams(40)))
    assert whole and server.aborted == 1


def test_no_generation_of_several_is_kept_when_one_breaks(folder: Path) -> None:
    server = fake()
    first = talk(server, folder)
    sessions = [first, first.fork()]
    for session in sessions:
        session.user("And now?")
    server.cut_after = 3
    with pytest.raises(ServerError):
        generate_together(sessions, FEW)
    assert all(session.messages[-1].role == "user" for session in sessions)
    server.cut_after = None
    assert len(generate_together(sessions, FEW)) == 2


@pytest.mark.parametrize("name", [*FAULTS, "a list", "no JSON"])
def test_connecting_to_what_is_no_server_says_what_came(name: str, folder: Path) -> None:
    server = fake()
    server.fail, _ = {**FAULTS, **REPLY_FAULTS}[name]
    with pytest.raises(ServerError) as caught:
        server.connect(folder)
    assert URL in caught.value.message and caught.value.hint


def test_a_model_without_a_length_is_none_of_vllm(folder: Path) -> None:
    server = fake()
    server.fail = answers(200, json={"data": [{"id": "gpt"}]})
    with pytest.raises(ServerError, match="does not say the longest context"):
        server.connect(folder)


def test_an_adapter_has_the_length_of_its_model(folder: Path) -> None:
    server = fake(served=("tiny", "tuned"))
    cards = [{"id": "tiny", "max_model_len": 99}, {"id": "tuned", "parent": "tiny"}]

    def fail(request: httpx.Request) -> httpx.Response | None:
        listed = request.url.path == "/v1/models"
        return httpx.Response(200, json={"data": cards}) if listed else None

    server.fail = fail
    assert server.connect(folder, model="tuned").engine.spec.max_positions == 99
    assert server.connect(folder).name == "tiny"  # an adapter is named, never chosen


# -- keys and addresses --------------------------------------------------------------------------


def test_a_key_is_sent_and_never_said(folder: Path) -> None:
    server = fake(api_key=KEY)
    with pytest.raises(ServerError, match="401") as caught:
        server.connect(folder, api_key=KEY + "x")
    assert KEY not in str(caught.value) and "api_key" in caught.value.hint
    model = server.connect(folder, api_key=KEY)
    assert KEY not in repr(model) + repr(model.engine.server) + repr(model.engine.facts)
    with pytest.raises(EngineError, match="no header may have") as refused:
        server.connect(folder, api_key=KEY + "\n")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("url", ["gpu-1:8000", "ftp://gpu-1", "http://", "http://gpu-1:port", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(EngineError, match="is no address of a server"):
        connect(url)


def test_an_address_that_holds_a_password_is_refused_without_it() -> None:
    with pytest.raises(EngineError) as caught:
        connect("http://me:hunter2@gpu-1:8000")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", [URL, URL + "/", URL + "/v1", URL + "/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json={})

    Server(url, transport=httpx.MockTransport(answer)).get("/v1/models")
    assert seen == [f"{URL}/v1/models"]


def test_a_path_before_the_api_is_kept() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(200, json={})

    Server(f"{URL}/team/v1", transport=httpx.MockTransport(answer)).get("/v1/models")
    assert seen == ["/team/v1/models"]


def test_without_httpx_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(EngineError, match="need the package httpx") as caught:
        connect(URL)
    assert "kvnotes[client]" in caught.value.hint


def test_a_model_that_is_closed_says_so(folder: Path) -> None:
    server = fake()
    model = server.connect(folder)
    session = Session(model, messages=[{"role": "user", "content": "Hi"}])
    model.close()
    with pytest.raises(EngineError, match="closed"):
        session.generate(FEW)
