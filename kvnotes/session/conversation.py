"""The state behind a session: what was computed last, what waits, and how a turn runs.

Owns `Conversation`: one plan of all waiting changes, the escalation of a verify, and which
part of a result stays as the live cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from kvnotes.engine.base import Execution, Stopwatch
from kvnotes.errors import EngineError
from kvnotes.plan import Match, Plan, num_equal, plan_keep
from kvnotes.prompt import ErratumStyle, Message, TokenizedPrompt
from kvnotes.segment import KVCache, KVSegment
from kvnotes.session.compare import clean_state
from kvnotes.session.edits import MAX_APPENDED_ERRATA, ErratumMode, PromptState, num_errata
from kvnotes.session.loaded import Model
from kvnotes.session.operations import Edit, Operation, corrects, effective, fold
from kvnotes.session.planner import Live, Planner, blocks_of, judging
from kvnotes.session.report import Evidence, Turn, Verification
from kvnotes.session.setup import variant_values
from kvnotes.session.strategy import Choice, Scorecard, choose, ladder
from kvnotes.session.verify import Checker


class Conversation:
    """Template, values and cache of one conversation, and the changes that wait.

    Args:
        model: Engine, tokenizer and compiled segments.
        base: The conversation as it was computed last.
        planner: Makes its plans.
        strategy: Default strategy.
        style: Wording of errata.
        mode: Whether errata rewrite what is cached.
        scorecard: What is proved about the model.
        clock: Time that the chat template shows; None is now.
    """

    def __init__(
        self,
        model: Model,
        base: PromptState,
        planner: Planner,
        *,
        strategy: str,
        style: ErratumStyle,
        mode: ErratumMode,
        scorecard: Scorecard | None,
        clock: datetime | None = None,
    ) -> None:
        self.model = model
        self.base = base
        self.planner = planner
        self.strategy = strategy
        self.style = style
        self.tokenizer = model.tokenizer.for_session(style, clock)
        self.mode: ErratumMode = mode
        self.scorecard = scorecard
        self.waiting: tuple[Operation, ...] = ()
        self.live: Live | None = None
        self.previous: dict[str, str] = {}
        self.lost = ""  # why a cache that was there before is not there now
        self.busy = False
        self._segments: tuple[KVSegment, ...] = ()

    def fork(self) -> Conversation:
        """Return a conversation that shares everything and goes its own way from here."""
        other = object.__new__(Conversation)
        other.__dict__.update(self.__dict__)
        other.busy = False
        if self.live is not None:
            other.live = Live(self.live.cache.fork(), self.live.blocks)
        return other

    def clean_prompt(self, state: PromptState) -> TokenizedPrompt:
        """Return the prompt of the current values: no errata, nothing pinned."""
        return self.render(clean_state(state), True)

    def change(self, op: str, *operations: Operation, segment: str | None = None) -> Turn:
        """Add changes to those that wait; return what all of them would do now.

        Args:
            op: Name of the change, for the report.
            operations: The changes.
            segment: A segment that comes with them: it is compiled first.
        """
        before = self.waiting
        self.waiting = (*before, *operations)
        try:
            choice = self.choose(self.waiting)
            state = self.folded(choice.strategy)
            if segment is not None:
                self.compile(state, segment)
            prompt = self.render(state, False)
            return self.turn(op, self.plan(choice, prompt), choice, prompt)
        except BaseException:
            self.waiting = before
            raise

    def run(
        self,
        operations: tuple[Operation, ...],
        choices: Sequence[Sequence[int]] | None,
        watch: Stopwatch,
        *,
        reserve: int = 0,
    ) -> tuple[Execution, TokenizedPrompt, Turn]:
        """Make one plan of all waiting changes and run it; the new state becomes the base.

        Args:
            operations: Changes that come with this call.
            choices: Tokens of the choices a verify judges.
            watch: Runs since the call that brought the turn.
            reserve: Tokens that will be generated after it.
        """
        waiting = (*self.waiting, *operations)
        choice = self.choose(waiting)
        checker = Checker(self, choice.verify, choices) if choice.verify else None
        rungs = ladder(choice.strategy, self.mode) if checker else (choice.strategy,)
        reserve = max([reserve, *(len(choice_ids) for choice_ids in choices or ())])
        tried: list[str] = []
        verification: Verification | None = None
        most = 0
        for rung in rungs:
            state = fold(self.base, waiting, rung, style=self.style, mode=self.mode)
            prompt = self.render(state, True)
            self.model.engine.check_length(
                prompt.num_tokens + reserve, "the prompt with its new tokens"
            )
            plan = self.plan(replace(choice, strategy=rung), prompt)
            last = rung == rungs[-1]
            execution = self._execute(plan, reserve, consume=checker is None or last)
            tried.append(rung)
            if checker is None:
                break
            agreed, num_tokens = (True, 0) if last else checker.check(execution, state, self.live)
            most = max(most, num_tokens)
            if agreed:
                share = most / max(1, prompt.num_tokens)
                verification = Verification(checker.level, True, tuple(tried), most, share)
                break
        ttft_ms = watch.elapsed_ms  # a checked result is given away only after its check
        if len(tried) > 1:
            refused = ", ".join(tried[:-1])
            choice = replace(choice, fallback_reason=f"verify {choice.verify!r} refused {refused}")
        turn = self.turn("turn", plan, replace(choice, strategy=tried[-1]), prompt)
        turn = replace(turn, ttft_ms=ttft_ms, verification=verification)
        changed = {n: v for n, v in self.base.values.items() if state.values[n] != v}
        self.previous = changed or self.previous
        self.base, self.waiting, self.lost = state, (), ""
        if choice.compile_after:
            self.compile(state)
        return execution, prompt, turn

    def _execute(self, plan: Plan, reserve: int, *, consume: bool) -> Execution:
        live = self.live
        try:
            return self.model.engine.execute(
                plan,
                base=live.cache if live else None,
                segments=self._segments,
                consume=consume,
                reserve=reserve,
            )
        except BaseException:
            if consume:
                self.live = None  # its memory may be half written; the next turn prefills
            raise

    def plan(self, choice: Choice, prompt: TokenizedPrompt) -> Plan:
        """Return the plan of a choice for a prompt."""
        cautious = choice.asked == "auto" or choice.strategy in ("suffix", "reprefill")
        ideal = self.planner.ideal(prompt, cautious=cautious)
        self._segments = ideal.segments
        if choice.keep and self.live is not None:
            return self._continued(self.live, prompt, ideal.plan, choice.strategy)
        return self.planner.plan(choice.strategy, prompt, self.live, ideal, choice.changed)

    def _continued(self, live: Live, prompt: TokenizedPrompt, ideal: Plan, strategy: str) -> Plan:
        """Nothing was changed: keep what is cached, compute what is new.

        If the template has rewritten earlier turns, everything behind that place is new.
        """
        ids = live.cache.token_ids
        kept = num_equal(ids, prompt.token_ids)
        matches = [Match(0, 0, kept)] if kept else []
        plan = plan_keep(live.cache.layout, matches, ideal, strategy=strategy)
        if kept == len(ids):
            return plan
        note = f"earlier_text_rewritten:from_token_{kept}:computed"
        return replace(plan, notes=(*plan.notes, note))

    def choose(self, operations: Sequence[Operation]) -> Choice:
        """Return the strategy for the changes that wait, with its evidence."""
        waiting = effective(self.base, operations)
        choice = choose(
            waiting,
            default=self.strategy,
            mode=self.mode,
            scorecard=self.scorecard,
            engine=self.model.engine,
        )
        if (
            any(map(corrects, waiting))
            and not self._is_cached
            and choice.strategy not in ("suffix", "reprefill")
        ):
            return replace(
                choice,
                strategy="suffix",
                fallback_reason="nothing is cached yet: the prompt shows the new values",
            )
        full = [
            name
            for operation in waiting
            if isinstance(operation, Edit)
            for name in operation.changes
            if self.mode == "append"
            and choice.strategy == "erratum"
            and num_errata(self.base.template, name) >= MAX_APPENDED_ERRATA
        ]
        if full:
            return replace(
                choice,
                strategy="suffix",
                fallback_reason=f"consolidated: {full[0]} has {MAX_APPENDED_ERRATA} errata, "
                "the limit",
            )
        if choice.strategy == "swap":
            return self._check_variants(choice, waiting)
        return choice

    def _check_variants(self, choice: Choice, waiting: Sequence[Operation]) -> Choice:
        """Fall back to `suffix` where the variant of the new value is not there to splice."""
        state = fold(self.base, waiting, "swap", style=self.style, mode=self.mode)
        prompt = self.render(state, False)
        spliced = {id(s) for s in self.planner.ideal(prompt, cautious=False).segments}
        for span in judging(prompt, choice.changed):
            shown = ", ".join(f"{name}={value}" for name, value in span.variant_values)
            found = self.model.book.find(span)
            if found is None:
                reason = f"segment {span.name!r} has no variant {shown} yet; it is compiled now"
                return replace(
                    choice, strategy="suffix", compile_after=True, fallback_reason=reason
                )
            if id(found) not in spliced:
                reason = f"segment {span.name!r} is computed, not spliced: no variant to swap"
                return replace(choice, strategy="suffix", fallback_reason=reason)
        return choice

    @property
    def _is_cached(self) -> bool:
        return self.live is not None and self.live.cache.length > 0

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take a turn back if it does not come to its end: no message is kept twice."""
        before = (self.base, self.waiting, self.previous, self.lost)
        if self.busy:
            raise EngineError(
                "a stream of this session is still open", hint="finish or close it first, or fork"
            )
        self.busy = True
        try:
            yield
        except BaseException:
            self.base, self.waiting, self.previous, self.lost = before
            raise
        finally:
            self.busy = False

    def folded(self, strategy: str | None) -> PromptState:
        """Return the state with all waiting changes."""
        if strategy is None:
            strategy = self.choose(self.waiting).strategy
        return fold(self.base, self.waiting, strategy, style=self.style, mode=self.mode)

    def render(self, state: PromptState, add_generation_prompt: bool) -> TokenizedPrompt:
        """Render a state; fields whose last message is gone keep their value unseen."""
        names = state.template.field_names
        values = {name: state.values[name] for name in names if name in state.values}
        return state.template.render(
            values, self.tokenizer, add_generation_prompt=add_generation_prompt
        )

    def turn(self, op: str, plan: Plan, choice: Choice, prompt: TokenizedPrompt) -> Turn:
        """Return the report of a plan."""
        evidence = Evidence(
            choice.evidence.kind, choice.evidence.detail, self.model.engine.cost.predict_ms(plan)
        )
        notices = [*plan.notes]
        notices += [f"escaped {text!r} in message {where!r}" for where, text in prompt.escaped]
        notices += [f"late system message {where!r} sent in a wrapper" for where in prompt.wrapped]
        return Turn(
            op=op,
            plan=plan,
            strategy=choice.strategy,
            evidence=evidence,
            template_rewrote=tuple(f"{r.message_id}: {r.reason}" for r in prompt.rewrites),
            fallback_reason=choice.fallback_reason or (self.lost or None),
            notices=tuple(notices),
            prompt=prompt,
        )

    def keep(self, execution: Execution, prompt: TokenizedPrompt) -> None:
        """Keep the cache of the history, without the generation prompt."""
        self.model.engine.finish(execution)
        history = self.render(self.base, False)
        length = min(execution.cache.length, history.num_tokens)
        if prompt.token_ids[:length] != history.token_ids[:length]:
            self.live = Live(execution.cache, blocks_of(prompt))
            return
        self.live = Live(execution.cache.truncated(length), blocks_of(history, length))

    def keep_reply(self, prompt: TokenizedPrompt, message: Message, cache: KVCache) -> None:
        """Add a generated message to the history and keep the cache that made it."""
        template = self.base.template.append(message)
        self.base = PromptState(template, self.base.values)
        history = self.render(self.base, False)
        if history.token_ids[: cache.length] == cache.token_ids:
            self.live = Live(cache, blocks_of(history, cache.length))
            return
        blocks = [b for b in blocks_of(prompt) if b.key != "generation"]
        start = blocks[-1].stop if blocks else 0
        made = replace(
            blocks[-1], key=f"message:{message.id}", start=start, stop=cache.length, anchors=()
        )
        self.live = Live(cache, (*blocks, made))

    def compile(self, state: PromptState, name: str | None = None) -> None:
        """Compile segments in use, and their declared variants, each in isolation.

        Args:
            state: The conversation that uses them.
            name: This one alone; None for all of them.
        """
        if not self.planner.splices:
            return
        for values in variant_values(state, name):
            prompt = self.render(PromptState(state.template, values), False)
            for span in prompt.segments:
                if name in (None, span.name):
                    self.model.book.compile(span)
        self._segments = ()
