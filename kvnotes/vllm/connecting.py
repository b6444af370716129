"""From the address of a server to a model that sessions take.

Owns `connect`: which model is served, whether its tokenizer is the one that is here, and what the
server can do. Needs the tokenizer of the model, and never its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvnotes.errors import EngineError, ServerError, SpecMismatchError, nearest
from kvnotes.prompt import PromptTokenizer, SegmentSpan
from kvnotes.segment import KVSegment
from kvnotes.session import Model, SegmentBook
from kvnotes.session.book import run_of
from kvnotes.vllm import bodies
from kvnotes.vllm.client import ServedFacts, VLLMEngine
from kvnotes.vllm.requests import KEY
from kvnotes.vllm.wire import CONNECT_SECONDS, READ_SECONDS, Server

if TYPE_CHECKING:
    import httpx

PROBE = (
    "system\nOrder #W2378156 \u2014 12,500.00 \u20ac, 10:45 o'clock.\n\n\tdef f(x):\n        "
    "return x != 3  # caf\u00e9 e\u0301 \u4f60\u597d \U0001f469\u200d\U0001f680 isn't\u00a0it?  "
)
"""Its tokens are compared: words, numbers, blanks and scripts that tokenizers cut differently."""

_UNKNOWN_SEGMENT = "kvnotes-probe"
_SHOWN = 12


class ServedBook(SegmentBook):
    """Segments that a server has, by name; their K/V stay there.

    Args:
        engine: The server.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine)
        self._server = engine
        self._held: dict[Any, KVSegment] = {}

    def compile(self, span: SegmentSpan, *, strict: bool = False) -> KVSegment:
        """Return a stand-in; whether the server has the segment, its reply says."""
        run = run_of(span)
        self._server.name(run, span.name, span.variant_values)
        if run not in self._held:
            self._held[run] = self._server.stand_in(run, span.preamble_ids)
        return self._held[run]

    def find(self, span: SegmentSpan) -> KVSegment | None:
        """Return the stand-in of a span."""
        return self._held.get(run_of(span))

    def nearest(self, span: SegmentSpan) -> tuple[KVSegment, int] | None:
        """Return None: a server splices whole segments."""
        return None

    def add(self, name: str, segment: KVSegment) -> None:
        """Refuse: K/V are not sent."""
        raise EngineError(
            f"segment {name!r} is here, K/V of a server are in the store that it reads",
            hint="put it there: kvnotes library push, or kvnotes compile --store",
        )


@dataclass(frozen=True)
class ServedModel(Model):
    """A model on a server; see `connect`."""

    engine: VLLMEngine
    book: ServedBook = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "book", ServedBook(self.engine))

    def close(self) -> None:
        """Close all connections; sessions of it cannot go on."""
        self.engine.close()


def connect(
    url: str,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    api_key: str | None = None,
    refresh: bool = False,
    connect_seconds: float = CONNECT_SECONDS,
    read_seconds: float = READ_SECONDS,
    transport: httpx.BaseTransport | None = None,
) -> ServedModel:
    """Return the model of a running vLLM server, for sessions.

    Args:
        url: Address of the server, with or without `/v1`.
        model: Its name there; None takes the one that is served.
        tokenizer: Folder or name of the model whose tokenizer and chat template are used, as for
            `kvnotes.load`; its weights are not needed. None takes what the server says it serves.
        chat_template: Jinja text used in place of the tokenizer's own.
        api_key: Key of the server; None for none.
        refresh: Allow `refresh` and `refresh+erratum`: what stood behind a changed field is used
            again. The server needs the plug-in, started with --allow-refresh.
        connect_seconds: Longest wait for a connection.
        read_seconds: Longest wait for the next byte of a reply.
        transport: Another way to reach it than the network, for tests.

    Raises:
        ServerError: It does not answer, or not as a vLLM server does.
        SpecMismatchError: It serves a model with another tokenizer.
        ModelNotFoundError: The tokenizer is not there.
        EngineError: httpx is not installed, or the URL is none.
    """
    from kvnotes.engine.models import load_tokenizer, resolve_model

    server = Server(
        url,
        api_key=api_key or "",
        connect_seconds=connect_seconds,
        read_seconds=read_seconds,
        transport=transport,
    )
    try:
        card = _card(server, model)
        name, root = str(card["id"]), str(card.get("root") or card["id"])
        resolved = resolve_model(tokenizer or root, weights=False)
        found = PromptTokenizer(load_tokenizer(resolved), chat_template)
        probed = _probe(server, name)
        _check_tokenizer(probed.prompt_ids, found, f"{name} at {server.url}", resolved.name)
    except BaseException:
        server.close()
        raise
    facts = ServedFacts(
        name=name,
        root=root,
        max_positions=int(card["max_model_len"]),
        vocab_size=found.vocab_size,
        ids=tuple(probed.ids.items()),
        plugin=probed.plugin,
    )
    return ServedModel(VLLMEngine(server, facts, refresh=refresh), found, name)


def _card(server: Server, model: str | None) -> Mapping[str, Any]:
    """Return what the server says about a model that it serves."""
    reply = server.get("/v1/models")
    cards = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
        raise ServerError(
            f"{server.url} was asked what it serves, and answers {str(reply)[:80]}",
            hint="is this the address of a vLLM server?",
        )
    by_name = {str(card["id"]): card for card in cards}
    if model is None:
        roots = [name for name, card in by_name.items() if not card.get("parent")]
        if len(roots) != 1:
            raise ServerError(
                f"{server.url} serves {', '.join(by_name) or 'nothing'}, and no model is named",
                hint="name one: model=...",
            )
        model = roots[0]
    if model not in by_name:
        raise ServerError(
            f"model {model!r} is asked for, {server.url} serves {', '.join(by_name) or 'nothing'}",
            hint=nearest(model, by_name),
        )
    card = by_name[model]
    base = by_name.get(str(card.get("parent")), {})  # an adapter has the length of its model
    longest = card.get("max_model_len") or base.get("max_model_len")
    if not isinstance(longest, int):
        raise ServerError(
            f"{server.url} does not say the longest context (max_model_len) of {model!r}",
            hint="is this the address of a vLLM server?",
        )
    return {**card, "max_model_len": longest}


@dataclass(frozen=True, slots=True)
class _Probed:
    """What one small request has shown.

    Args:
        prompt_ids: Tokens of the probe on the server.
        ids: How ids of generated tokens are asked for.
        plugin: The plug-in is there.
    """

    prompt_ids: tuple[int, ...]
    ids: Mapping[str, object]
    plugin: bool


def _probe(server: Server, name: str) -> _Probed:
    """Generate one token behind a text, and see what the server knows of what kvnotes needs.

    A segment that nobody has is wished for: a server with the plug-in says that it has none.
    """
    body = {
        "model": name,
        "prompt": PROBE,
        "add_special_tokens": False,
        **bodies.NEUTRAL,
        **bodies.IDS,
        **bodies.IDS_IN_WORDS,
        "max_tokens": 1,
        "kv_transfer_params": {KEY: {"segments": [_UNKNOWN_SEGMENT]}},
    }
    reply = server.post(bodies.PATH, body)
    (choice,) = bodies.choices_of(reply, 1)
    bodies.token_ids(choice)
    knows_ids = choice.get("token_ids") is not None
    prompt_ids = choice.get("prompt_token_ids")
    if prompt_ids is None:
        asked = {"model": name, "prompt": PROBE, "add_special_tokens": False}
        prompt_ids = server.post("/tokenize", asked).get("tokens")
    if not isinstance(prompt_ids, list):
        raise ServerError(
            f"{server.url} does not say the tokens of a text",
            hint="kvnotes compares them with its own: the server needs return_token_ids in "
            "/v1/completions, or /tokenize",
        )
    plugin = KEY in (reply.get("kv_transfer_params") or {})
    ids = bodies.IDS if knows_ids else bodies.IDS_IN_WORDS
    return _Probed(tuple(prompt_ids), ids, plugin)


def _check_tokenizer(
    theirs: Sequence[int], tokenizer: PromptTokenizer, served: str, here: str
) -> None:
    """Refuse a server whose model has another tokenizer.

    Raises:
        SpecMismatchError: Names both, and where their tokens of the same text part.
    """
    ours = tokenizer.encode(PROBE)
    if tuple(theirs) == ours:
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b),
        min(len(theirs), len(ours)),
    )
    raise SpecMismatchError(
        f"{served} and the tokenizer of {here} part at token {place} of the same text: "
        f"{list(theirs[place : place + _SHOWN])} there, {list(ours[place : place + _SHOWN])} here",
        hint="name the model that is served: tokenizer=FOLDER, or a hub id",
    )
