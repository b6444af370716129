"""Every arm at every rate, in turn: blocks of requests, counters around them, decisions after."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvnotes.bench.options import Say
from kvnotes.bench.result import BenchResult
from kvnotes.bench.serve.load import Timed, arrivals, drive
from kvnotes.bench.serve.options import ServeOptions
from kvnotes.bench.serve.prompts import (
    FIELD,
    OLD,
    Arm,
    Ask,
    Prompt,
    Prompts,
    ceiling,
    common_prefix,
    fork_of,
    make_ask,
    plugin_arms,
    stock_arms,
)
from kvnotes.bench.serve.report import Decision, Found, report
from kvnotes.bench.serve.server import (
    HITS,
    LOADED,
    PREEMPTIONS,
    QUERIES,
    Counters,
    Facts,
    ServerClient,
    require_room,
)
from kvnotes.bench.timing import Probe
from kvnotes.errors import EngineError
from kvnotes.prompt import PromptTokenizer
from kvnotes.vllm.requests import KEY

MAX_WAITS = 20
"""Seconds for which a block waits for a busy machine before it runs anyway."""

DECISIONS = "decisions"
"""What is not measured where a server does not give the log-probabilities that are asked for."""

NO_PLUGIN = "the server does not run the plug-in of kvnotes"


@dataclass(frozen=True)
class Target:
    """A running server, and what has to be known of it.

    Args:
        client: The server.
        tokenizer: Of the model that it serves.
        machine: What the numbers depend on.
    """

    client: ServerClient
    tokenizer: PromptTokenizer
    machine: dict[str, Any]


def run(target: Target, text: str, options: ServeOptions, say: Say) -> BenchResult:
    """Measure every length.

    Raises:
        EngineError: The server does not answer.
        SpecMismatchError: It serves another model.
        PlanError: The text or the model's context is too short.
    """
    facts = target.client.facts()
    target.client.check_tokenizer(target.tokenizer, facts.model)
    bench = _Bench(target, facts, options, say)
    for length in options.lengths:
        bench.measure(Prompts(target.tokenizer, text, length))
    found = bench.found
    found.machine |= {"vllm": facts.version, "block_size": facts.block_size}
    found.machine |= {"plugin": facts.has_plugin}
    return report(found, options)


@dataclass
class _Lane:
    """One arm over one policy.

    Args:
        arm: The arm.
        salt: Its name in the server's cache: arms share nothing.
        params: What its requests say to the plug-in; None on a stock server.
        history: What the server has computed under its salt.
    """

    arm: Arm
    salt: str
    params: dict[str, Any] | None
    history: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def extra(self) -> dict[str, Any]:
        """What each of its requests has beside the prompt."""
        found: dict[str, Any] = {"cache_salt": self.salt}
        return found if self.params is None else found | {"kv_transfer_params": {KEY: self.params}}


class _Bench:
    """One run over a server."""

    def __init__(self, target: Target, facts: Facts, options: ServeOptions, say: Say) -> None:
        self._client, self._tokenizer = target.client, target.tokenizer
        self._facts, self._options, self._say = facts, options, say
        self._run = secrets.token_hex(8)
        self._probe = Probe()
        self._next = 0
        self.found = Found(dict(target.machine))

    def measure(self, prompts: Prompts) -> None:
        """Measure one policy."""
        options, length = self._options, prompts.num_tokens
        lanes = self._lanes(prompts)
        longest = max(len(prompts.prompt(x.arm, make_ask(0)).token_ids) for x in lanes)
        require_room(self._facts, longest + _SPARE_TOKENS + options.output_tokens)
        size = -(-options.requests // options.blocks)
        sizes = [min(size, options.requests - at) for at in range(0, options.requests, size)]
        for rate in (*options.rates, None):
            for block, size in enumerate(sizes):
                asks = [make_ask(self._next + i) for i in range(size + 1)]
                self._next += size + 1
                times = arrivals(size, rate, f"{options.seed}/{length}/{rate}/{block}")
                wanted = [x for x in lanes if rate is None or not x.arm.swept]
                for lane in wanted if block % 2 == 0 else reversed(wanted):
                    at = "all at once" if rate is None else f"{rate:g}/s"
                    self._say(f"{length} tokens, {at}, block {block + 1}: {lane.arm.name}")
                    made = [prompts.prompt(lane.arm, ask) for ask in asks]
                    self._block(lane, length, rate, made, times)
                    if rate is None and DECISIONS not in self.found.missing:
                        self._decide(lane, length, asks[:-1], made[:-1])
        self.found.machine["question_tokens"] = prompts.question_tokens(make_ask(0))

    def _lanes(self, prompts: Prompts) -> list[_Lane]:
        """Return the arms that can be measured; compile what they need."""
        length = prompts.num_tokens
        lanes = []
        for arm in stock_arms(self._options.places):
            stock = {"splice": False} if self._facts.has_plugin else None
            lanes.append(_Lane(arm, self._salt(length, arm.name), stock))
        missing = ""
        names: dict[str, str] = {}
        if self._facts.has_plugin:
            self._say(f"{length} tokens: the policy is compiled")
            names, missing = self._compiled(prompts)
        for arm in plugin_arms():
            if arm.segment not in names:
                self.found.missing[arm.name] = missing or NO_PLUGIN
                continue
            params: dict[str, Any] = {"segments": [names[arm.segment]]}
            params["num_seam_tokens"] = arm.num_seam_tokens
            if arm.segment == "behind old":
                params["values"] = {FIELD: OLD}
            lanes.append(_Lane(arm, self._salt(length, arm.name), params))
        return lanes

    def _salt(self, length: int, what: str) -> str:
        """Return a name in the server's cache that no other run has; `/` and `@` are refused."""
        return f"{self._run} {length} {what}"

    def _compiled(self, prompts: Prompts) -> tuple[dict[str, str], str]:
        """Have the policy compiled; return the names of what was, and why the rest was not."""
        behind = prompts.behind_old()
        alone = behind.token_ids[behind.start : behind.stop]
        wishes: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "alone": (alone, {}),
            "behind old": (
                behind.token_ids,
                {"preamble_tokens": behind.start, "variant": {FIELD: OLD}},
            ),
        }
        names: dict[str, str] = {}
        reason = ""
        for kind, (ids, wish) in wishes.items():
            name = f"kvnotes-bench-{prompts.num_tokens}-{kind.replace(' ', '-')}"
            salt = self._salt(prompts.num_tokens, f"compile {kind}")
            said = self._client.compile(ids, {"name": name, **wish}, salt, self._facts.model)
            if said:
                reason = said
            else:
                names[kind] = name
        return names, reason

    def _block(
        self,
        lane: _Lane,
        length: int,
        rate: float | None,
        made: Sequence[Prompt],
        times: Sequence[float],
    ) -> None:
        """Measure one block of one arm; the last of its prompts is not timed, it warms up."""
        options, arm = self._options, lane.arm
        spare, prompts = made[-1], made[:-1]
        warm = spare.token_ids if arm.segment else common_prefix(made)
        if warm:
            self._client.compute(warm, model=self._facts.model, **lane.extra)
            lane.history.append(tuple(warm))
        best = ceiling(arm, prompts, lane.history, self._facts.block_size)
        lane.history += [prompt.token_ids for prompt in prompts]
        requests = [
            Timed(at, self._body(lane, prompt.token_ids))
            for at, prompt in zip(times, prompts, strict=True)
        ]
        busy = self._wait_until_idle()
        before = self._client.counters()
        block = drive(self._client.address, requests, timeout_s=options.timeout_s)
        failed = any(record.error for record in block.records)
        after = self._client.settled(before, 0 if failed else best.total)
        cell = self.found.cell(arm, length, rate)
        cell.tally.add(block)
        cell.disturbed += busy
        cell.place = len(common_prefix(made)) / len(spare.token_ids)
        cell.add(*(_grown(before, after, name) for name in (QUERIES, HITS, LOADED, PREEMPTIONS)))
        cell.ceiling.append(best)

    def _body(self, lane: _Lane, token_ids: Sequence[int]) -> bytes:
        number = self._options.output_tokens
        return json.dumps(
            {
                "model": self._facts.model,
                "prompt": list(token_ids),
                "temperature": 0,
                "max_tokens": number,
                "min_tokens": number,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **lane.extra,
            }
        ).encode()

    def _decide(
        self, lane: _Lane, length: int, asks: Sequence[Ask], prompts: Sequence[Prompt]
    ) -> None:
        """Ask for the decision of each request: what it would answer, as the arm is cached."""
        for ask, prompt in zip(asks, prompts, strict=True):
            fork = fork_of(self._tokenizer, ask)
            ids = (*prompt.token_ids, *fork.token_ids)
            try:
                said = self._client.decide(ids, fork.choices, model=self._facts.model, **lane.extra)
            except EngineError as error:
                self.found.missing[DECISIONS] = error.message
                return
            scores = tuple(said[i] for i in fork.choices)
            self.found.decisions.append(Decision(length, lane.arm.name, ask, scores))

    def _wait_until_idle(self) -> int:
        """Wait while something else uses the machine; return 1 if it does not end."""
        for _ in range(MAX_WAITS):
            if not self._probe.busy():
                return 0
            time.sleep(1)
        return 1


_SPARE_TOKENS = 32
"""By which one question may be longer than another."""


def _grown(before: Counters, after: Counters, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
