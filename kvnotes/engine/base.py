"""What an engine is: the contract that every backend keeps.

Owns `Engine` and the values it takes and returns. Knows token ids, plans and caches; no
text, no fields. A batch axis exists only inside an engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvnotes.engine.abilities import Abilities
from kvnotes.engine.exchange import Exchange
from kvnotes.errors import EngineError, OutOfCacheError, PlanError, UnsupportedModelError
from kvnotes.plan import CostModel, Match, Plan, Reuse, Run
from kvnotes.rope import Rotary
from kvnotes.segment import KVCache, KVSegment
from kvnotes.spec import ModelIdentity, ModelSpec

Executor = Literal["fast", "view", "copy", "loop"]
"""How a plan is run: `fast` reads K/V where they stand, if the model can and if there are enough
of them, and computes all new tokens in one masked forward; `view` reads them there however few
they are; `copy` puts everything in one buffer first; `loop` is the plain reference, step by step
over a cache that grows by concatenation."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Args:
        max_new_tokens: Stop after this many tokens.
        temperature: 0 takes the most likely token; above 0 samples.
        top_p: Sample from the smallest set of tokens with at least this probability.
        top_k: Sample from the k most likely tokens; 0 means all.
        seed: Seed of the sampler; the same seed gives the same tokens.
        stop: Strings that end the text; the caller, who knows text, applies them.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop
        limits = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "stop": not isinstance(stop, str) and all(self.stop),
        }
        for name, fine in limits.items():
            if not fine:
                raise EngineError(
                    f"sampling parameter {name}={getattr(self, name)!r} is out of range",
                    hint="max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0, "
                    "stop a tuple of strings that are not empty",
                )


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of a plan.

    Args:
        cache: The cache of the plan's target.
        logits: Logits after the last token, float32 `[vocab]`; None if nothing was computed
            at the end, or not here.
        elapsed_ms: Wall time of the execution.
        exchange: What a server says about it, if one computes it.
    """

    cache: KVCache
    logits: Float[Tensor, " vocab"] | None
    elapsed_ms: float
    exchange: Exchange | None = None

    def last_logits(self) -> Float[Tensor, " vocab"]:
        """Return the logits.

        Raises:
            EngineError: The plan ended in Reuse.
        """
        if self.logits is None:
            served = self.exchange is not None
            raise EngineError(
                "a server keeps its logits"
                if served
                else "the plan ends in Reuse and yields no logits",
                hint="ask for choices or text" if served else "compute at least the last token",
            )
        return self.logits


@dataclass(frozen=True, slots=True)
class Fed:
    """A token that is fed back behind a cache.

    Args:
        cache: Prompt, with room behind it.
        num_fed: How many tokens stand behind it already.
        token_id: The token.
        place: Its position for the model.
    """

    cache: KVCache
    num_fed: int
    token_id: int
    place: int


@runtime_checkable
class Generation(Protocol):
    """Tokens as they are generated; iterate it, then read `cache`."""

    def __iter__(self) -> Iterator[int]:
        """Yield token ids, the stop token included."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens yielded so far."""

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and all generated tokens that were fed back (not the last)."""

    def close(self) -> None:
        """End it: no further token comes."""


class Engine(ABC):
    """Compiles, executes, generates and scores on one loaded model."""

    identity: ModelIdentity
    rotaries: tuple[Rotary, ...]
    cost: CostModel
    abilities: Abilities = Abilities()
    """What sessions may ask of it."""
    copies_because: str = ""
    """Why K/V have to be copied to where they are needed; "": they are read where they stand."""

    @property
    def spec(self) -> ModelSpec:
        """Shapes and rotary embedding of the model."""
        return self.identity.spec

    @property
    def fingerprint(self) -> str:
        """Who computes here; segments of another fingerprint are refused."""
        return self.identity.fingerprint

    @abstractmethod
    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        """Prefill tokens in isolation, behind their declared preamble only.

        Raises:
            EngineError: Nothing to compile.
            OutOfCacheError: Preamble and tokens exceed the model's context.
        """

    @abstractmethod
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
        """Run a plan.

        Args:
            plan: What to reuse, move and compute.
            base: The cache whose runs the plan reuses.
            segments: Compiled segments it reuses.
            consume: The caller will not use `base` again: its memory may be overwritten.
            reserve: Room that will be wanted behind the result, in tokens.
            executor: See `Executor`; all give the same result, to rounding.

        Raises:
            UnknownSegmentError: A run is held neither by `base` nor by `segments`.
            SpecMismatchError: A source belongs to another model.
            OutOfCacheError: The target is longer than the model's context.
        """

    @abstractmethod
    def generate(
        self, start: Execution, params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> Generation:
        """Continue an execution token by token.

        Raises:
            OutOfCacheError: Prompt and limit exceed the model's context, before any work.
        """

    def together(self, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
        """Generate several at once; one may be closed while this runs.

        An engine that computes them in one pass reads what they share once. This one runs them
        one after the other.

        Yields:
            Which of them, and its next token.
        """
        for index, generation in enumerate(generations):
            for token_id in generation:
                yield index, token_id

    @abstractmethod
    def room_for(self, cache: KVCache, num_tokens: int) -> KVCache:
        """Return the same cache with room for so many tokens behind it."""

    @abstractmethod
    def step(self, rows: Sequence[Fed]) -> Float[Tensor, "rows vocab"]:
        """Compute one more token of each of some sequences; return the logits after them.

        Their K/V go behind each cache, which must have room.
        """

    @abstractmethod
    def gathered(self, cache: KVCache) -> KVCache:
        """Return the same cache with every token at the slot of its position in one buffer."""

    @abstractmethod
    def score(self, start: Execution, choices: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the summed log-probability of each choice's tokens after the prompt."""

    def next_token(self, start: Execution) -> int:
        """Return the most likely token after the prompt."""
        return int(start.last_logits().argmax())

    def finish(self, start: Execution) -> None:
        """See to it that a plan is computed, if that waits until something is asked for."""
        del start  # what is executed here is computed

    def recalled(self, run: Run) -> KVSegment | None:
        """Return what stands for a run whose K/V are kept elsewhere; None: they are here."""
        return None

    @abstractmethod
    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        """Score how much the K/V of each token from `start` on would change.

        Runs the first layers only, over `token_ids` with `cache` up to `start`, and compares
        with what `cache` holds there (CacheBlend's key deviation).
        """

    @property
    @abstractmethod
    def note_score_share(self) -> float:
        """Share of the layers that `note_scores` runs."""

    @abstractmethod
    def masked_forward(
        self,
        token_ids: Sequence[int],
        positions: Int[Tensor, " tokens"],
        visible: Bool[Tensor, "tokens tokens"],
        rows: Sequence[int],
    ) -> Float[Tensor, "rows vocab"]:
        """One forward without any cache, each token seeing what `visible` says: the oracle.

        Windows and chunks of the model hide more of it, by position. What stood before a moved
        token may have a negative one.
        """

    @abstractmethod
    def own_forward(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Return the logits after a prompt as the model alone computes them, by its defaults."""

    def prefill(self, token_ids: Sequence[int]) -> Execution:
        """Compute everything from nothing: the exact reference."""
        return self.execute(Plan.prefill(token_ids))

    def sources_of(
        self, plan: Plan, base: KVCache | None, segments: Iterable[KVSegment]
    ) -> list[KVSegment]:
        """Return the segments that a plan may reuse, after the checks that come before any work.

        Raises:
            EngineError: The plan has no steps.
            SpecMismatchError: A source belongs to another model.
            OutOfCacheError: The target is longer than the model's context.
            PlanError: It moves K/V of a model that attends in chunks to another place in them.
        """
        self.check_length(len(plan.token_ids), "the prompt")
        if not plan.steps:
            raise EngineError("the prompt is empty: no token to compute", hint="add a message")
        sources = [*(base.sources if base is not None else ()), *segments]
        for segment in sources:
            if segment.identity is not self.identity:
                self.identity.check_same(
                    segment.identity, f"a segment of {segment.num_tokens} tokens"
                )
        for view in self.unmovable(plan):
            raise PlanError(
                f"the plan keeps {view.num_tokens} tokens, moved by {view.shift}, at token "
                f"{view.target_start}; {self.why_unmovable[1]}",
                hint="compute them instead: a session plans so by itself",
            )
        return sources

    def place_after(self, token_ids: Sequence[int]) -> int:
        """Return the position of the token after a prompt: its length, where no images are."""
        return len(token_ids)

    def add_image(
        self, pixels: Float[Tensor, "patches ..."], grid: tuple[int, int, int]
    ) -> tuple[int, ...]:
        """Make an image known; return the token ids that stand for it in prompts.

        Args:
            pixels: `pixel_values` as the model's processor makes them.
            grid: Its `image_grid_thw`: patches in time, height and width.

        Raises:
            UnsupportedModelError: The model takes no images.
            EngineError: The grid does not fit the pixels.
        """
        raise UnsupportedModelError(
            f"model type {self.spec.model_type!r} takes no images", hint="send text alone"
        )

    def probe_image(self) -> tuple[int, ...] | None:
        """Return the ids of a small random image; None where the model takes none."""
        return None

    def unmovable(self, plan: Plan) -> tuple[Reuse, ...]:
        """Return the views that may not stand where a plan puts them: none, but for chunks.

        With attention in chunks a move must keep who shares a chunk with whom: by a multiple of
        the chunk, or inside of the first one.
        """
        chunk = self.spec.chunk_size
        if not chunk:
            return ()
        return tuple(
            view
            for view in plan.steps
            if isinstance(view, Reuse)
            and view.shift % chunk
            and max(view.run.start + view.source_stop, view.target_stop) > chunk
        )

    @property
    def why_unmovable(self) -> tuple[str, str]:
        """Why some views may not stand where a plan puts them: for its notes, and for people."""
        chunk = self.spec.chunk_size
        return f"chunks_of_{chunk}:moved_part", (
            f"this model attends in chunks of {chunk}, and only multiples of that are exact"
            if chunk
            else "an image of another shape now stands before them"
        )

    def check_length(self, num_tokens: int, what: str) -> None:
        """Refuse what does not fit, before any work.

        Raises:
            OutOfCacheError: Names both lengths.
        """
        if num_tokens > self.spec.max_positions:
            raise OutOfCacheError(
                f"{what} needs {num_tokens} tokens, the model's context has "
                f"{self.spec.max_positions}{_because(self.spec.limit_reason)}",
                hint="delete messages, shorten a segment, or generate less",
            )


def _because(reason: str) -> str:
    return f" here, because {reason}" if reason else ""


def set_num_threads(num_threads: int | None = None) -> int:
    """Set how many CPU threads the engines of this process use; return how many they use now.

    Args:
        num_threads: At least 1; None leaves it as it is.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def engine_versions() -> tuple[tuple[str, str], ...]:
    """Return names and versions of the libraries that compute K/V."""
    return tuple((name, version(name)) for name in ("torch", "transformers"))


class Stopwatch:
    """Wall time in milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds so far."""
        return self.ms_at(time.perf_counter())

    def ms_at(self, moment: float) -> float:
        """Milliseconds at a moment of `time.perf_counter`."""
        return (moment - self._start) * 1e3
