"""Sessions over a running vLLM server, stock or with the plug-in.

Owns `VLLMEngine`: an engine whose K/V are a server's. The client keeps prompts as token ids and
sends them whole; what the server's prefix cache has of them it does not compute again, so a prompt
only ever grows at its end. Nothing is sent when a plan is executed: the request that asks for text
or for scores brings its prompt along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.abilities import Abilities
from kvnotes.engine.base import Execution, Executor, Fed, Generation, SamplingParams, Stopwatch
from kvnotes.engine.exchange import Exchange
from kvnotes.engine.shapes import ShapeEngine
from kvnotes.errors import EngineError
from kvnotes.plan import Compute, CostModel, Match, Plan, Reuse, Run
from kvnotes.plan.lineage import layout_token_ids
from kvnotes.segment import KVCache, KVSegment
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec
from kvnotes.vllm import bodies
from kvnotes.vllm.choices import reads, sums
from kvnotes.vllm.config import MIN_TOKENS
from kvnotes.vllm.requests import KEY
from kvnotes.vllm.streams import ServedStream
from kvnotes.vllm.wire import Server

_STOCK = Abilities(
    strategies=("erratum", "suffix", "reprefill"),
    auto="erratum",
    auto_because="a server's cache has nothing behind a change, so what is cached stays as it is",
    erratum_modes=("append",),
    splices=False,
    verify_levels=("full",),
    holds_kv=False,
    title="a stock vLLM server",
    because="it reuses what is unchanged from the first token on, and nothing else",
    hint="over a server use strategy 'erratum', 'suffix' or 'reprefill', errata in mode 'append' "
    "and verify 'full'; a model loaded with kvnotes.load can do everything",
)
_PLUGIN = replace(
    _STOCK,
    splices=True,
    title="a vLLM server with the plug-in",
    because="it reuses what is unchanged from the first token on, and compiled segments",
)

_REFRESHING = replace(
    _PLUGIN,
    strategies=("erratum", "refresh", "refresh+erratum", "suffix", "reprefill"),
    erratum_modes=("append", "rewrite"),
    title="a vLLM server with the plug-in and refresh",
    because="it reuses what is unchanged from the first token on, compiled segments, and what "
    "stands behind one change of as many tokens",
)

_REFRESH = "refresh"

_HELD = "a server keeps the K/V and the logits that this needs"


class ServerCost(CostModel):
    """The times of a machine that nobody has measured from here."""

    def predict_ms(self, plan: Plan) -> float:
        """Return no number: not known."""
        return math.nan

    def splice_pays(self, num_tokens: int, target_start: int, num_seam_tokens: int) -> bool:
        """Whether the plug-in takes a segment of so many tokens."""
        return num_tokens >= max(MIN_TOKENS, 2 * num_seam_tokens)


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """What is known of a server.

    Args:
        name: What it calls the model.
        root: Where it says that it has it from.
        max_positions: Longest prompt with its reply.
        vocab_size: Tokens of the tokenizer.
        ids: How token ids are asked for.
        plugin: It has the plug-in, which splices.
    """

    name: str
    root: str
    max_positions: int
    vocab_size: int
    ids: tuple[tuple[str, object], ...]
    plugin: bool

    @property
    def identity(self) -> ModelIdentity:
        """Who computes there, as far as that can be known from outside."""
        spec = ModelSpec(
            model_type=f"{self.name} on a server",
            layers=(LayerSpec("full", 1, 1, moves=()),),
            num_attention_heads=1,
            hidden_size=1,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype="unknown",
            ropes=(),
            constants=(("root", self.root),),
            limit_reason="its server has that --max-model-len",
        )
        return ModelIdentity(spec, "unknown")


@dataclass(frozen=True, slots=True)
class _Change:
    """A stretch of a prompt that has changed, of as many tokens as before.

    Args:
        start: Its first token.
        token_ids: What stood there.
        views: What stands behind it, as before.
    """

    start: int
    token_ids: tuple[int, ...]
    views: tuple[Reuse, ...]


@dataclass(slots=True, eq=False)
class _Asked(Exchange):
    """A prompt that the server is asked about.

    Args:
        names: Segments that are to be spliced.
    """

    names: tuple[str, ...] = ()


class VLLMEngine(ShapeEngine):
    """Computes on a running vLLM server; `kvnotes.vllm.connect` makes one.

    Args:
        server: Where it is.
        facts: What is known of it.
        refresh: Use again what stood behind a changed field; the server has to allow it.
    """

    title = "a vLLM server"
    hint = "load the model itself with kvnotes.load for that"
    dtype = torch.float16  # of nothing: caches here are shapes
    rotaries = ()
    cost = ServerCost(math.nan, math.nan, math.nan, math.nan)

    def __init__(self, server: Server, facts: ServedFacts, *, refresh: bool = False) -> None:
        self.server = server
        self.facts = facts
        self.identity = facts.identity
        self.abilities = _STOCK
        if facts.plugin:
            self.abilities = _REFRESHING if refresh else _PLUGIN
        self._segments: dict[Run, tuple[str, tuple[tuple[str, str], ...]]] = {}

    def close(self) -> None:
        """Close all connections."""
        self.server.close()

    # -- segments that the server has ----------------------------------------------------------

    def name(self, run: Run, name: str, variant: tuple[tuple[str, str], ...]) -> None:
        """Take note of what a run is called where the server has it."""
        self._segments[run] = (name, variant)

    def recalled(self, run: Run) -> KVSegment:
        """Return a stand-in: of a conversation that goes on, the server has what it still has."""
        return self.stand_in(run)

    def unmovable(self, plan: Plan) -> tuple[Reuse, ...]:
        """Return what the server cannot reuse: all but what stands in front, and segments."""
        unfit, in_front = [], True
        behind = self._change(plan)
        for step in plan.steps:
            if behind is not None and step in behind.views:
                continue
            if isinstance(step, Compute):
                in_front = False
            elif step.run not in self._segments and (step.moved or not in_front):
                unfit.append(step)
                in_front = False
        return tuple(unfit)

    def _change(self, plan: Plan) -> _Change | None:
        """Return the first change of a plan, if what stands behind it can be used again."""
        if not self.abilities.allows(_REFRESH):
            return None
        if any(isinstance(s, Reuse) and s.run in self._segments for s in plan.steps):
            return None
        steps = iter(plan.steps)
        changed = next((step for step in steps if isinstance(step, Compute)), None)
        if changed is None:
            return None
        kept = takewhile(lambda step: isinstance(step, Reuse) and not step.moved, steps)
        views = tuple(step for step in kept if isinstance(step, Reuse))
        before = layout_token_ids(plan.base)[changed.target_start : changed.target_stop]
        if not views or len(before) < changed.num_tokens:
            return None
        return _Change(changed.target_start, before, views)

    @property
    def why_unmovable(self) -> tuple[str, str]:
        """Why not, for a plan's notes and for people."""
        return "behind_a_change:not_on_a_server", self.abilities.because

    def _asked(self, plan: Plan) -> _Asked:
        """Return what requests about a plan carry: the segments that it splices, and no others."""
        if not self.facts.plugin:
            return _Asked()
        change = self._change(plan)
        if change is not None:
            said = {"start": change.start, "token_ids": list(change.token_ids)}
            return _Asked({"kv_transfer_params": {KEY: {_REFRESH: said}}}, names=(_REFRESH,))
        seams: dict[Run, int] = {}
        for step in plan.steps:
            if isinstance(step, Reuse) and step.run in self._segments:
                seams.setdefault(step.run, step.source_start)
        used = [self._segments[run] for run in seams]
        names = tuple(dict.fromkeys(name for name, _ in used))
        wish: dict[str, object] = {"splice": False}
        if names:
            wish = {
                "segments": list(names),
                "values": dict(pair for _, variant in used for pair in variant),
                "num_seam_tokens": max(seams.values()),
            }
        return _Asked({"kv_transfer_params": {KEY: wish}}, names=names)

    # -- the contract --------------------------------------------------------------------------

    def execute(
        self,
        plan: Plan,
        *,
        base: KVCache | None = None,
        segments: Iterable[KVSegment] = (),
        consume: bool = False,
        reserve: int = 0,
        executor: Executor = "fast",
    ) -> Execution:
        """Take note of a plan; the server computes it with the first request about it."""
        watch = Stopwatch()
        cache = self.arranged(plan, base, segments, reserve)
        return Execution(cache, None, watch.elapsed_ms, self._asked(plan))

    def generate(
        self, start: Execution, params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> Generation:
        """Generate on the server; nothing is sent before the first token is asked for."""
        limit = params.max_new_tokens
        self.check_length(start.cache.length + limit, "prompt and new tokens")
        said = {**bodies.sampled(params, stop_ids), **dict(self.facts.ids)}
        return ServedStream(
            self.server,
            self._body(start, said),
            self.room_for(start.cache, limit),
            self._exchange(start),
            limit=limit,
            stop_ids=stop_ids,
            first=lambda: self._report_splice(start),
        )

    def together(self, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
        """Generate several at once: the server batches what is asked for at the same time."""
        streams = [stream for stream in generations if isinstance(stream, ServedStream)]
        assert len(streams) == len(generations)
        try:
            for stream in streams:
                stream.open()
            left = dict(enumerate(streams))
            while left:
                for index, stream in list(left.items()):
                    token_id = stream.next_id()
                    if token_id is None:
                        del left[index]
                    else:
                        yield index, token_id
        finally:
            for stream in streams:
                stream.close()

    def score(self, start: Execution, choices: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the summed log-probability of each choice, read token by token."""
        longest = self.check_choices(choices)
        self.check_length(start.cache.length + longest, "prompt and choices")
        found: dict[tuple[int, ...], float] = {}
        for read in reads(choices):
            replies = self._ask(start, bodies.scoring(read.wanted), read.beginnings)
            for beginning, reply in zip(read.beginnings, replies, strict=True):
                for token_id, value in bodies.next_log_probs(reply, read.wanted).items():
                    through = (*beginning, token_id)
                    found[through] = value
        return sums(choices, found)

    def next_token(self, start: Execution) -> int:
        """Return the most likely token after the prompt."""
        said = {**bodies.NEUTRAL, "max_tokens": 1, **dict(self.facts.ids)}
        (reply,) = self._ask(start, said)
        (token_id,) = bodies.token_ids(reply)
        return token_id

    def finish(self, start: Execution) -> None:
        """Have the server compute a prompt, if nothing was asked of it yet."""
        if self._exchange(start).served is None:
            self.next_token(start)

    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        """Refuse: what it compiles would be the server's."""
        raise EngineError(
            f"a segment of {len(token_ids)} tokens cannot be compiled from here: {_HELD}",
            hint="compile it into the store that the server reads: kvnotes compile",
        )

    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        """Refuse: notes are in the K/V."""
        raise EngineError(f"notes cannot be scored from here: {_HELD}", hint=self.hint)

    @property
    def note_score_share(self) -> float:
        """Refuse, as above."""
        raise EngineError(f"notes cannot be scored from here: {_HELD}", hint=self.hint)

    def step(self, rows: Sequence[Fed]) -> Float[Tensor, "rows vocab"]:
        """Refuse: a server gives no logits."""
        raise EngineError(f"one token cannot be computed from here: {_HELD}", hint=self.hint)

    # -- requests ------------------------------------------------------------------------------

    @staticmethod
    def _exchange(start: Execution) -> _Asked:
        assert isinstance(start.exchange, _Asked), "an execution of another engine"
        return start.exchange

    def _body(
        self, start: Execution, said: Mapping[str, object], prompt: object = None
    ) -> dict[str, object]:
        ids = list(start.cache.token_ids) if prompt is None else prompt
        return {
            "model": self.facts.name,
            "prompt": ids,
            **said,
            **self._exchange(start).carried,
        }

    def _ask(
        self,
        start: Execution,
        said: Mapping[str, object],
        beginnings: Sequence[tuple[int, ...]] = ((),),
    ) -> list[Mapping[str, Any]]:
        """Send one request, and take note of what the first reply about a prompt says.

        Args:
            start: The prompt.
            said: How tokens are chosen, and what is wanted of them.
            beginnings: What stands behind it, for each prompt that is sent.

        Returns:
            A choice for each prompt.
        """
        exchange, watch = self._exchange(start), Stopwatch()
        prompts = [[*start.cache.token_ids, *beginning] for beginning in beginnings]
        reply = self.server.post(bodies.PATH, self._body(start, said, prompts))
        found = bodies.choices_of(reply, len(prompts))
        if exchange.served is None:
            exchange.told_at = perf_counter()
            exchange.served = bodies.served(reply, watch.elapsed_ms, exchange.names)
        return found

    def _report_splice(self, start: Execution) -> None:
        """Ask once what became of a splice: the events of a stream do not say it."""
        if self._exchange(start).names:
            self.finish(start)
