"""From a rendered prompt to a plan.

Owns the bridge between spans (text) and integers: blocks for alignment, splices for
compiled segments, the ideal plan, and which plan each strategy makes of the live cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvnotes.plan import (
    DEFAULT_NOTE_SHARE,
    DEFAULT_NUM_SEAM_TOKENS,
    FIELD_BEFORE_SEGMENT,
    Block,
    Match,
    Plan,
    Reuse,
    Splice,
    align,
    plan_compose,
    plan_keep,
    plan_suffix,
    plan_without,
    select_notes,
)
from kvnotes.prompt import SegmentSpan, TokenizedPrompt
from kvnotes.segment import KVCache, KVSegment
from kvnotes.session.loaded import Model

SplicePolicy = Literal["auto", "always", "never"]

GENERATION_BLOCK = "generation"


@dataclass(frozen=True, slots=True)
class Live:
    """The cache of a conversation and which message each of its tokens belongs to."""

    cache: KVCache
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Ideal:
    """The plan that builds a prompt from compiled segments and computation alone."""

    plan: Plan
    segments: tuple[KVSegment, ...]


def blocks_of(prompt: TokenizedPrompt, length: int | None = None) -> tuple[Block, ...]:
    """Return the messages of a prompt as blocks, their field occurrences as anchors.

    Args:
        prompt: The rendered prompt.
        length: Clip to this many tokens.
    """
    stop = prompt.num_tokens if length is None else length
    blocks = []
    for span in prompt.spans:
        if span.kind not in ("message", "generation") or span.start >= stop:
            continue
        end = min(span.stop, stop)
        anchors: list[tuple[int, int]] = []
        for other in prompt.spans:
            inside = span.start <= other.start and other.stop <= end
            free = not anchors or other.start >= anchors[-1][1]
            if other.kind == "field" and inside and free:
                anchors.append((other.start, other.stop))
        key = GENERATION_BLOCK if span.kind == "generation" else f"message:{span.name}"
        blocks.append(Block(key, span.start, end, tuple(anchors)))
    return tuple(blocks)


class Planner:
    """Makes plans for one session.

    Args:
        model: Engine, tokenizer and compiled segments.
        num_seam_tokens: Seam tokens computed at each splice.
        splice: `auto` splices where it pays and skips no notes; `always`; `never`.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_seam_tokens: int = DEFAULT_NUM_SEAM_TOKENS,
        splice: SplicePolicy = "auto",
    ) -> None:
        self._model = model
        self.num_seam_tokens = num_seam_tokens
        self.splice = splice

    @property
    def splices(self) -> bool:
        """Whether compiled segments are used at all."""
        return self.splice != "never" and self._model.engine.abilities.splices

    def ideal(self, prompt: TokenizedPrompt, *, cautious: bool) -> Ideal:
        """Plan a prompt from nothing.

        Args:
            prompt: The rendered prompt.
            cautious: Compute segments behind a field they could hold notes about, rather
                than splice them.
        """
        splices: list[Splice] = []
        used: list[KVSegment] = []
        notes: list[str] = []
        for span in prompt.segments if self.splices else ():
            found = self._splice_for(span, prompt)
            if found is None:
                notes.append(f"not_compiled:{span.name}:computed")
                continue
            splice, segment = found
            size = splice.source_stop - splice.source_start
            if splice.field_before and cautious and self.splice == "auto":
                notes.append(f"{FIELD_BEFORE_SEGMENT}:{span.name}:computed")
            elif self.splice == "auto" and not self._model.engine.cost.splice_pays(
                size, splice.target_start, self.num_seam_tokens
            ):
                notes.append(f"below_break_even:{span.name}:computed")
            else:
                splices.append(splice)
                used.append(segment)
        plan = plan_compose(prompt.token_ids, splices, num_seam_tokens=self.num_seam_tokens)
        plan = replace(plan, notes=(*plan.notes, *notes))
        return Ideal(self._movable(plan), tuple(used))

    def _splice_for(
        self, span: SegmentSpan, prompt: TokenizedPrompt
    ) -> tuple[Splice, KVSegment] | None:
        """Return the compiled segment of a span: all of it, or what stands before an edit in it."""
        book = self._model.book
        segment = book.find(span)
        stop = span.standalone_stop
        if segment is None:
            near = book.nearest(span)
            if near is None:
                return None
            segment, stop = near[0], min(near[1], stop)
        start = span.standalone_start
        if stop <= start:
            return None
        known = {name for name, _ in span.variant_values}
        before = any(
            field.kind == "field" and field.start < span.start and field.name not in known
            for field in prompt.spans
        )
        target = span.start + span.num_edge_left
        return Splice(span.name, segment.run, start, stop, target, before), segment

    def plan(
        self,
        strategy: str,
        prompt: TokenizedPrompt,
        live: Live | None,
        ideal: Ideal,
        changed: frozenset[str] = frozenset(),
    ) -> Plan:
        """Return the plan a strategy makes of the live cache.

        Args:
            strategy: Any but `auto`.
            prompt: The prompt wanted.
            live: What is cached now.
            ideal: The plan that builds the prompt from nothing.
            changed: Fields that change: `swap` replaces the segments with variants of them.
        """
        if strategy == "reprefill":
            return Plan.prefill(prompt.token_ids)
        if live is None or not live.cache.length:
            return replace(ideal.plan, strategy=strategy)
        if strategy == "suffix":
            return plan_suffix(live.cache.layout, ideal.plan)
        matches = self.matches(prompt, live)
        recompute: tuple[int, ...] = ()
        if strategy == "swap":
            matches = _without_swapped(matches, ideal.plan, judging(prompt, changed))
        elif strategy == "selective":
            recompute = self.notes_to_recompute(prompt, live, matches, DEFAULT_NOTE_SHARE)
        return self.keep(live, matches, ideal, strategy=strategy, recompute=recompute)

    def keep(
        self,
        live: Live,
        matches: Sequence[Match],
        ideal: Ideal,
        *,
        strategy: str,
        recompute: Sequence[int] = (),
    ) -> Plan:
        """Keep matched live tokens, as far as the model lets them stand where they go."""
        layout = live.cache.layout
        plan = plan_keep(layout, matches, ideal.plan, strategy=strategy, recompute=recompute)
        return self._movable(plan)

    def _movable(self, plan: Plan) -> Plan:
        """Compute what the engine cannot have where the plan puts it."""
        engine = self._model.engine
        return plan_without(plan, engine.unmovable(plan), f"{engine.why_unmovable[0]}:computed")

    def matches(self, prompt: TokenizedPrompt, live: Live) -> tuple[Match, ...]:
        """Align the live tokens with a prompt."""
        return align(live.cache.token_ids, live.blocks, prompt.token_ids, blocks_of(prompt))

    def notes_to_recompute(
        self, prompt: TokenizedPrompt, live: Live, matches: Sequence[Match], share: float
    ) -> tuple[int, ...]:
        """Choose the notes after the first change that deviate most.

        Args:
            share: Share of the scored tokens that is chosen.
        """
        scores = self._model.engine.note_scores(live.cache, prompt.token_ids, matches)
        positions = [position for position, _ in scores]
        values = [score for _, score in scores]
        return select_notes(values, positions, round(share * len(positions)))


def judging(prompt: TokenizedPrompt, changed: frozenset[str]) -> list[SegmentSpan]:
    """Return the segments that have a variant for each value of a changed field."""
    return [span for span in prompt.segments if changed & {name for name, _ in span.variant_values}]


def _without_swapped(
    matches: Sequence[Match], ideal: Plan, spans: Sequence[SegmentSpan]
) -> tuple[Match, ...]:
    """Drop matches where the ideal plan splices the variants that are swapped in."""
    swapped = [
        (step.target_start, step.target_stop)
        for step in ideal.steps
        if isinstance(step, Reuse)
        and any(s.start <= step.target_start and step.target_stop <= s.stop for s in spans)
    ]
    result: list[Match] = []
    for match in matches:
        pieces = [(match.target_start, match.target_start + match.num_tokens)]
        for low, high in swapped:
            pieces = [
                part
                for start, stop in pieces
                for part in ((start, min(stop, low)), (max(start, high), stop))
                if part[0] < part[1]
            ]
        shift = match.source_start - match.target_start
        result.extend(Match(start + shift, start, stop - start) for start, stop in pieces)
    return tuple(result)
