"""A server that answers as vLLM does, in this process: its HTTP, its stops, its prefix cache.

What comes next is said by a function of all tokens before, so a reply depends on the whole prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from helpers_prompt import family_tokenizer
from transformers import PreTrainedTokenizerFast

from kvnotes.vllm import connect
from kvnotes.vllm.connecting import ServedModel

LogProbs = Callable[[tuple[int, ...]], np.ndarray]
"""Log-probability of every next token, float64 `[vocab]`."""

URL = "http://gpu-1:8000"
BLOCK = 4
TOKEN = "token_id:"


def hashed(vocab_size: int) -> LogProbs:
    """Random numbers that depend on every token before."""

    @lru_cache(4096)
    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        seed = hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).digest()
        logits = np.random.default_rng(np.frombuffer(seed, np.uint32)).normal(size=vocab_size) * 3
        return logits - np.log(np.exp(logits).sum())

    return log_probs


@dataclass
class FakeVLLM:
    """A server.

    Args:
        tokenizer: Of the model that is served.
        log_probs: What it computes.
        segments: Token ids of segments, by name: it has the plug-in. None: it is a stock server.
        knows_ids: `return_token_ids`, and what comes with it.
        knows_scores: `logprob_token_ids`.
        tells_cached: `--enable-prompt-tokens-details`.
        max_model_len: Longest context.
        api_key: Asked for.
        fail: Called with each request; what it returns or raises is the answer.
        cut_after: Streams break after so many tokens.
        end_after: Replies end after so many tokens, as the server's own limit.
        reason: What a reply that ended by itself gives as its reason.
    """

    tokenizer: PreTrainedTokenizerFast
    log_probs: LogProbs
    segments: dict[str, tuple[int, ...]] | None = None
    knows_ids: bool = True
    knows_scores: bool = True
    tells_cached: bool = True
    max_model_len: int = 2048
    api_key: str = ""
    fail: Callable[[httpx.Request], httpx.Response | None] | None = None
    cut_after: int | None = None
    end_after: int | None = None
    reason: str | None = None
    served: tuple[str, ...] = ("tiny",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    cached: set[tuple[int, ...]] = field(default_factory=set)
    aborted: int = 0
    computed: int = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def connect(self, folder: Path, **options: Any) -> ServedModel:
        return connect(URL, tokenizer=str(folder), transport=self.transport(), **options)

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of the completion requests, in order, but for the probe."""
        found = [body["prompt"] for body in self.bodies if not isinstance(body["prompt"], str)]
        return [
            p for prompt in found for p in (prompt if isinstance(prompt[0], list) else [prompt])
        ]

    # -- requests ------------------------------------------------------------------------------

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.fail is not None and (answer := self.fail(request)) is not None:
            return answer
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if given != self.api_key:
            return httpx.Response(401, json={"error": "Unauthorized"})
        if request.url.path == "/v1/models":
            card = {"max_model_len": self.max_model_len, "root": "/models/tiny"}
            return httpx.Response(200, json={"data": [{"id": i, **card} for i in self.served]})
        body = json.loads(request.content)
        if body.get("model") not in self.served:
            message = f"The model `{body.get('model')}` does not exist."
            return httpx.Response(404, json={"error": {"message": message, "code": 404}})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": self._encode(body["prompt"])})
        assert request.url.path == "/v1/completions"
        self.bodies.append(body)
        prompt = body["prompt"]
        prompts = (
            [tuple(self._encode(prompt))]
            if isinstance(prompt, str)
            else [tuple(p) for p in (prompt if isinstance(prompt[0], list) else [prompt])]
        )
        for ids in prompts:
            if len(ids) + 1 > self.max_model_len:
                message = f"Input length ({len(ids)}) exceeds the maximum."
                return httpx.Response(400, json={"error": {"message": message, "code": 400}})
        if body.get("stream"):
            return httpx.Response(200, stream=_Body(self, self._stream(body, prompts[0])))
        return httpx.Response(200, json=self._whole(body, prompts))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _whole(self, body: dict[str, Any], prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        choices, hits, said = [], 0, {}
        for index, ids in enumerate(prompts):
            hits, said = self._prefill(ids, body)
            made = list(self._generate(body, ids))
            choice = self._choice(body, ids, made) | {"index": index}
            choice["finish_reason"] = self._reason(body, made)
            if self.knows_ids and body.get("return_token_ids"):
                choice["prompt_token_ids"] = list(ids)
            choices.append(choice)
            first = said if index == 0 else first
        reply = {"choices": choices, "usage": self._usage(prompts, hits)}
        return reply | ({"kv_transfer_params": {"kvnotes": first}} if first else {})

    def _stream(self, body: dict[str, Any], ids: tuple[int, ...]) -> Iterator[bytes]:
        hits, _ = self._prefill(ids, body)
        made: list[int] = []
        yield b": keep-alive\n\n"
        for token_id in self._generate(body, ids):
            if self.cut_after is not None and len(made) == self.cut_after:
                raise httpx.RemoteProtocolError("peer closed connection without sending it all")
            before = (*ids, *made)
            made.append(token_id)
            choice = self._choice(body, before, [token_id]) | {"index": 0}
            if self._ended(body, made):
                choice["finish_reason"] = self._reason(body, made)
            yield _event({"choices": [choice]})
        assert body["stream_options"] == {"include_usage": True}
        self._keep((*ids, *made[:-1]), body)
        yield _event({"choices": [], "usage": self._usage([ids], hits)})
        yield b"data: [DONE]\n\n"

    # -- what vLLM does ------------------------------------------------------------------------

    def _prefill(self, ids: tuple[int, ...], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Look a prompt up in blocks; return the hits and what the plug-in says."""
        said, salt = self._splice(ids, body)
        hits = 0
        for stop in range(BLOCK, len(ids), BLOCK):
            if (*salt, *ids[:stop]) not in self.cached:
                break
            hits = stop
        self._keep(ids, body)
        self.computed += len(ids) - hits
        return hits, said

    def _keep(self, ids: tuple[int, ...], body: dict[str, Any]) -> None:
        _, salt = self._splice(ids, body)
        blocks = range(BLOCK, len(ids) + 1, BLOCK)
        self.cached.update((*salt, *ids[:stop]) for stop in blocks)

    def _splice(
        self, ids: tuple[int, ...], body: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        wish = (body.get("kv_transfer_params") or {}).get("kvnotes")
        if self.segments is None or wish is None or wish.get("splice") is False:
            return {}, ()
        found = [
            name
            for name in wish.get("segments", ())
            if (part := self.segments.get(name)) and _position(ids, part) is not None
        ]
        if not found:
            return {"strategy": "reprefill", "fallback_reason": "no_segment"}, ()
        number = sum(len(self.segments[name]) for name in found)
        salt = tuple(-1 - list(self.segments).index(name) for name in found)
        return {"segments": found, "spliced_tokens": number, "fallback_reason": ""}, salt

    def _generate(self, body: dict[str, Any], ids: tuple[int, ...]) -> Iterator[int]:
        assert body["ignore_eos"] and body["repetition_penalty"] == 1.0 and body["stop"] == []
        made: list[int] = []
        while not self._ended(body, made):
            made.append(int(self.log_probs((*ids, *made)).argmax()))
            yield made[-1]

    def _ended(self, body: dict[str, Any], made: Sequence[int]) -> bool:
        stopped = bool(made) and made[-1] in body.get("stop_token_ids", ())
        limit = min(body["max_tokens"], self.end_after or body["max_tokens"])
        return stopped or len(made) >= limit

    def _reason(self, body: dict[str, Any], made: Sequence[int]) -> str:
        stopped = made[-1] in body.get("stop_token_ids", ())
        return self.reason or ("stop" if stopped else "length")

    def _choice(
        self, body: dict[str, Any], before: tuple[int, ...], made: Sequence[int]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": "x\u2028y\x85"}  # JSON may hold what ends lines elsewhere
        if self.knows_ids and body.get("return_token_ids"):
            choice["token_ids"] = list(made)
        if body.get("logprobs") is None:
            return choice
        assert body["return_tokens_as_token_ids"]
        tokens, tops = [], []
        for index, token_id in enumerate(made):
            row = self.log_probs((*before, *made[:index]))
            wanted = body.get("logprob_token_ids") if self.knows_scores else None
            tokens.append(f"{TOKEN}{token_id}")
            tops.append({f"{TOKEN}{i}": float(row[i]) for i in (token_id, *(wanted or ()))})
        choice["logprobs"] = {"tokens": tokens, "top_logprobs": tops}
        return choice

    def _usage(self, prompts: Sequence[tuple[int, ...]], hits: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": sum(map(len, prompts))}
        return usage | (
            {"prompt_tokens_details": {"cached_tokens": hits}} if self.tells_cached else {}
        )


class _Body(httpx.SyncByteStream):
    """What is read of a stream, and whether that was all."""

    def __init__(self, server: FakeVLLM, pieces: Iterator[bytes]) -> None:
        self._server = server
        self._pieces = pieces
        self._whole = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        self._whole = True

    def close(self) -> None:
        self._server.aborted += not self._whole


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _position(ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    starts = range(len(ids) - len(part) + 1)
    return next((i for i in starts if ids[i : i + len(part)] == part), None)


def tokenizer_folder(folder: Path, family: str = "smollm2") -> Path:
    """Save a tokenizer as the folder of a model without weights."""
    family_tokenizer(family).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def fake(family: str = "smollm2", **options: Any) -> FakeVLLM:
    """A server of the tokenizer's model, with hashed log-probabilities."""
    tokenizer = family_tokenizer(family)
    return FakeVLLM(tokenizer, options.pop("log_probs", hashed(len(tokenizer))), **options)
