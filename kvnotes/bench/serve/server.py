"""What is asked of a server beside the load: its model, its counters, segments, decisions."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnotes.bench.serve.load import Address
from kvnotes.errors import EngineError, PlanError, SpecMismatchError
from kvnotes.prompt import PromptTokenizer
from kvnotes.vllm.requests import KEY

SETTLE_S = 10.0
"""How long counters may stay behind the replies."""

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
LOADED = "kvnotes:loaded_tokens_total"
PLANS = "kvnotes:plans_total"
COMPILED = "kvnotes:compiled_total"
PREEMPTIONS = "vllm:num_preemptions_total"
REFUSED = ("kvnotes:refused_total", "kvnotes:failed_total")

Counters = dict[str, float]
"""A counter's name to its value, summed over its labels."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROBE = "order_status: pending (since 2 February, 02:11:59)\n\nCan it be sent back?"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says about itself.

    Args:
        model: What requests call its model.
        max_model_len: Longest prompt with its reply; None: it does not say.
        block_size: Tokens of a block of its cache.
        version: Its version of vLLM.
        has_plugin: Whether it runs the plug-in.
    """

    model: str
    max_model_len: int | None
    block_size: int
    version: str
    has_plugin: bool


class ServerClient:
    """A server that runs.

    Args:
        url: Where it is.
        timeout_s: A request that takes longer has failed.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.address = Address(url)
        self._timeout_s = timeout_s

    def facts(self) -> Facts:
        """Return what it says about itself.

        Raises:
            EngineError: It does not answer, or is no vLLM.
        """
        models = json.loads(self._ask("GET", "/v1/models"))["data"]
        text = self._ask("GET", "/metrics").decode()
        sizes = {x["block_size"] for x in label_sets(text, "vllm:cache_config_info")}
        if len(sizes) != 1 or not next(iter(sizes)).isdecimal():
            raise EngineError(
                f"{self.address.url} names no block size in vllm:cache_config_info of its /metrics",
                hint="give the address of one vLLM server, not of a router before several",
            )
        return Facts(
            str(models[0]["id"]),
            models[0].get("max_model_len"),
            int(sizes.pop()),
            str(json.loads(self._ask("GET", "/version"))["version"]),
            PLANS in counters(text),
        )

    def check_tokenizer(self, tokenizer: PromptTokenizer, model: str) -> None:
        """Check that the server's model reads the tokens that this one writes.

        Raises:
            SpecMismatchError: It does not.
        """
        said = self._post("/tokenize", model=model, prompt=_PROBE, add_special_tokens=False)
        here = tokenizer.encode(_PROBE)
        if tuple(said["tokens"]) != here:
            raise SpecMismatchError(
                f"the server's {model} makes {len(said['tokens'])} tokens of a text, the model "
                f"named here {len(here)} others",
                hint="name the model that is served with --model",
            )

    def counters(self) -> Counters:
        """Return all counters."""
        return counters(self._ask("GET", "/metrics").decode())

    def settled(self, before: Mapping[str, float], queries: int) -> Counters:
        """Return the counters once they have taken in so many tokens of prompts.

        Args:
            before: They as they were.
            queries: Tokens of all prompts since then.
        """
        until = time.monotonic() + SETTLE_S
        while True:
            now = self.counters()
            if now[QUERIES] - before[QUERIES] >= queries or time.monotonic() > until:
                return now
            time.sleep(0.05)

    def compute(self, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
        """Compute a prompt and one token; return the reply."""
        return self._post("/v1/completions", prompt=list(token_ids), max_tokens=1, **more)

    def decide(
        self, token_ids: Sequence[int], choices: Sequence[int], **more: Any
    ) -> dict[int, float]:
        """Return the log-probability of each choice as the next token.

        Raises:
            EngineError: The server does not say.
        """
        reply = self.compute(
            token_ids,
            temperature=0,
            logprobs=1,
            logprob_token_ids=list(choices),
            return_tokens_as_token_ids=True,
            **more,
        )
        said = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        found = {i: said.get(f"token_id:{i}") for i in choices}
        if None in found.values():
            raise EngineError(
                f"the server says nothing about {list(found.values()).count(None)} of "
                f"{len(found)} tokens that were asked for",
                hint="logprob_token_ids needs vLLM 0.32",
            )
        return {i: float(value) for i, value in found.items() if value is not None}

    def compile(
        self, token_ids: Sequence[int], wish: Mapping[str, Any], salt: str, model: str
    ) -> str:
        """Have a prompt compiled as a segment.

        Returns:
            Why it was not; "" where it was.
        """
        before = self.counters()
        self.compute(
            token_ids,
            model=model,
            cache_salt=salt,
            kv_transfer_params={KEY: {"compile": dict(wish)}},
        )
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            # the plug-in counts a segment when it is there: vLLM tells that with its next step
            self.compute(token_ids[:1], model=model, cache_salt=salt)
            text = self._ask("GET", "/metrics").decode()
            now = counters(text)
            if now[COMPILED] > before[COMPILED]:
                return ""
            if any(now.get(name, 0) > before.get(name, 0) for name in REFUSED):
                return "the server refused to compile: " + ", ".join(_reasons(text))
            time.sleep(0.05)
        return f"the server has compiled nothing within {SETTLE_S:.0f} s"

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._ask("POST", path, json.dumps(body)))
        return reply

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = self.address.connect(self._timeout_s)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            connection.request(method, self.address.path(path), body, headers)
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{method} {self.address.url}{path} got no answer: {error}",
                hint="is the server running, and is this its address?",
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            shown = said[:300].decode(errors="replace")
            raise EngineError(
                f"{method} {self.address.url}{path} answered {response.status}: {shown}",
                hint="see the server's log",
            )
        return said


def counters(text: str) -> Counters:
    """Return the values of Prometheus' text, summed over labels."""
    found: Counters = {}
    for name, _, value in _samples(text):
        found[name] = found.get(name, 0.0) + value
    return found


def label_sets(text: str, wanted: str) -> list[dict[str, str]]:
    """Return the labels of a metric."""
    return [labels for name, labels, _ in _samples(text) if name == wanted]


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is not None:
            labels = dict(_LABEL.findall(match[2] or ""))
            found.append((match[1], labels, float(match[3])))
    return found


def _reasons(text: str) -> list[str]:
    return sorted(
        labels["reason"]
        for name in REFUSED
        for labels in label_sets(text, name)
        if "reason" in labels
    )


def require_room(facts: Facts, num_tokens: int) -> None:
    """Check that the longest prompt with its reply fits into the model's context.

    Raises:
        PlanError: It does not.
    """
    if facts.max_model_len is not None and num_tokens > facts.max_model_len:
        raise PlanError(
            f"the longest prompt and its reply have {num_tokens} tokens, the server takes "
            f"{facts.max_model_len}",
            hint="give shorter --lengths",
        )
