"""One live conversation: template, values, cache.

Owns `Session`, the facade. Changes are collected; the next turn that needs logits makes
one plan of all of them, so an edit costs nothing until it is needed and then one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvnotes.engine.base import Execution, SamplingParams, Stopwatch
from kvnotes.errors import UnknownFieldError, nearest
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS, Plan, check_strategy
from kvnotes.prompt import (
    ErratumStyle,
    Field,
    Message,
    PromptTemplate,
    SegmentText,
    TokenizedPrompt,
)
from kvnotes.segment import KVCache
from kvnotes.session.compare import References, clean_state
from kvnotes.session.edits import (
    MAX_APPENDED_ERRATA,
    ErratumMode,
    PromptState,
    num_errata,
)
from kvnotes.session.loaded import Model
from kvnotes.session.operations import (
    Append,
    Delete,
    Edit,
    Move,
    Operation,
    Replace,
    effective,
    fold,
)
from kvnotes.session.planner import Live, Planner, SplicePolicy, blocks_of
from kvnotes.session.reply import decide, reply
from kvnotes.session.report import Evidence, Turn, Verification
from kvnotes.session.setup import as_message, as_segment, variant_values
from kvnotes.session.strategy import Choice, Scorecard, choose, ladder
from kvnotes.session.verify import Checker, VerifyLevel


class Session:
    """A conversation whose fields can be edited and whose segments are spliced.

    Args:
        model: What `load` returns.
        messages: The conversation so far; `Message` values or `{"role", "content"}` dicts.
        text: A plain text template, instead of messages.
        fields: Value of every field the template uses.
        segments: Text (or `SegmentText`) of every segment it uses; compiled here, once.
        strategy: Default strategy of edits.
        num_seam_tokens: Seam tokens at each splice; None takes the scorecard's or the default.
        erratum: Wording of errata.
        erratum_mode: `rewrite` keeps one statement per field; `append` touches nothing cached.
        scorecard: What is proved about this model.
        splice: `auto` splices where it pays and skips no notes.

    Raises:
        TemplateError: The template, a field or a value is wrong.
        UnknownSegmentError: A segment is used that is not given.

    Example:
        >>> session = Session(model, messages=[{"role": "system", "content": "state: {{state}}"}],
        ...                   fields={"state": "open"})
        >>> session.edit(state="closed")
        >>> session.user("What is the state?", generate=SamplingParams(8)).text
    """

    def __init__(
        self,
        model: Model,
        *,
        messages: Sequence[Message | Mapping[str, str]] = (),
        text: str | None = None,
        fields: Mapping[str, str] | None = None,
        segments: Mapping[str, str | SegmentText] | None = None,
        strategy: str = "auto",
        num_seam_tokens: int | None = None,
        erratum: ErratumStyle | None = None,
        erratum_mode: ErratumMode = "rewrite",
        scorecard: Scorecard | None = None,
        splice: SplicePolicy = "auto",
    ) -> None:
        self.model = model
        self.strategy = check_strategy(strategy)
        self.erratum = erratum or ErratumStyle()
        self.erratum_mode: ErratumMode = erratum_mode
        self.scorecard = scorecard
        parts = tuple(as_segment(name, value) for name, value in (segments or {}).items())
        template = (
            PromptTemplate.text_template(text, segments=parts)
            if text is not None
            else PromptTemplate.chat([as_message(m) for m in messages], segments=parts)
        )
        if num_seam_tokens is None:
            num_seam_tokens = scorecard.num_seam_tokens if scorecard else DEFAULT_NUM_SEAM_TOKENS
        self.planner = Planner(model, num_seam_tokens=num_seam_tokens, splice=splice)
        self._base = PromptState(template, dict(fields or {}))
        self._operations: tuple[Operation, ...] = ()
        self._live: Live | None = None
        self._previous: dict[str, str] = {}
        self._references = References(model, self._render)
        self._next_id = 0
        self._check_values(self._base.values)
        self._compile(self._base)

    # -- what the conversation is now ------------------------------------------------------

    @property
    def state(self) -> PromptState:
        """Template and values with all waiting changes."""
        return self._folded(None)

    @property
    def values(self) -> Mapping[str, str]:
        """Current value of each field."""
        return self.state.values

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, waiting ones included."""
        return self.state.template.messages

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache."""
        return self._live.cache.length if self._live else 0

    @property
    def exact(self) -> bool:
        """Whether the cache equals a cold prefill of its tokens, by lineage."""
        return self._live is None or self._live.cache.exact

    def render(self, *, add_generation_prompt: bool = False) -> TokenizedPrompt:
        """Return the prompt as it stands, waiting changes included."""
        return self._render(self.state, add_generation_prompt)

    def clean_prompt(self, state: PromptState) -> TokenizedPrompt:
        """Return the prompt of the current values: no errata, nothing pinned."""
        return self._render(clean_state(state), True)

    # -- changes ---------------------------------------------------------------------------

    def edit(
        self,
        changes: Mapping[str, str] | None = None,
        /,
        *,
        strategy: str | None = None,
        verify: VerifyLevel | None = None,
        **fields: str,
    ) -> Turn:
        """Change the values of fields; takes effect with the next turn that computes.

        Args:
            changes: Field names and new values.
            strategy: Instead of the session's.
            verify: `full` or `cheap`: check the result and escalate until it agrees.
            fields: The same as `changes`, as keyword arguments.

        Returns:
            A turn whose plan is what the edit alone would do now; nothing has run yet.
        """
        name = check_strategy(strategy or self.strategy)
        values = {**(changes or {}), **fields}
        for field in values:
            if field not in self._base.values:
                raise UnknownFieldError(
                    f"unknown field {field!r}", hint=nearest(field, self._base.values)
                )
        self._check_values(values)
        return self._change("edit", Edit(values, name, verify))

    def delete(self, message_id: str, *, strategy: str | None = None) -> Turn:
        """Remove a message; under `auto`, `suffix` and `reprefill` its notes go as well."""
        return self._change("delete", Delete(message_id, check_strategy(strategy or self.strategy)))

    def move(self, message_id: str, *, before: str | None, strategy: str | None = None) -> Turn:
        """Put a message before another one, or (None) at the end."""
        name = check_strategy(strategy or self.strategy)
        return self._change("move", Move(message_id, before, name))

    def replace(self, message_id: str, content: str, *, strategy: str | None = None) -> Turn:
        """Give a message another text."""
        name = check_strategy(strategy or self.strategy)
        return self._change("replace", Replace(message_id, content, name))

    def add(self, role: str, content: str, *, id: str = "") -> Turn:
        """Add a message; it is computed with the next turn that needs logits."""
        return self._change(role, Append(self._new_message(role, content, id)))

    # -- turns that compute ----------------------------------------------------------------

    def user(
        self,
        content: str,
        *,
        decide: Sequence[str] | None = None,
        generate: SamplingParams | None = None,
        compare: bool = False,
        id: str = "",
    ) -> Turn:
        """Add a user message and answer it: by scoring choices, or by generating."""
        if decide is None and generate is None:
            return self.add("user", content, id=id)
        watch = Stopwatch()
        operation = Append(self._new_message("user", content, id))
        return self._compute("user", (operation,), decide, generate, compare, watch)

    def decide(self, choices: Sequence[str], *, compare: bool = False) -> Turn:
        """Score choices as the assistant's next words; nothing is added to the history."""
        return self._compute("decide", (), choices, None, compare, Stopwatch())

    def generate(self, params: SamplingParams | None = None, *, compare: bool = False) -> Turn:
        """Generate the assistant's next message."""
        return self._compute("generate", (), None, params or SamplingParams(), compare, Stopwatch())

    def stream(self, params: SamplingParams | None = None) -> Iterator[str]:
        """Generate the assistant's next message piece by piece; the history has it at the end."""
        params = params or SamplingParams()
        execution, prompt, _ = self._run((), None, Stopwatch())
        answer = reply(self.model, execution, params)
        yield from answer
        self._keep_reply(prompt, answer.message(self._new_id()), answer.cache)

    def verify(self) -> Verification:
        """Audit the conversation: one clean prefill, compared with the cache as it is.

        Nothing is changed; run it off the request path if it is long.
        """
        execution, prompt, _ = self._run((), None, Stopwatch())
        self._keep(execution, prompt)
        checker = Checker(self, "full", None)
        agreed, num_tokens = checker.check(execution, prompt, self._base, None)
        share = num_tokens / max(1, prompt.num_tokens)
        return Verification("full", agreed, (), num_tokens, share)

    def consolidate(self) -> Turn:
        """Make the cache clean by `suffix`: no errata, no stale notes. Runs when idle."""
        self._operations = (*self._operations, Edit({}, "suffix", None, consolidate=True))
        execution, prompt, turn = self._run((), None, Stopwatch())
        self._keep(execution, prompt)
        return replace(turn, op="consolidate", fallback_reason="consolidated: errata removed")

    def fork(self) -> Session:
        """Return a session that shares everything and goes its own way from here."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other._references = References(self.model, self._render)
        if self._live is not None:
            other._live = Live(self._live.cache.fork(), self._live.blocks)
        return other

    # -- inside ----------------------------------------------------------------------------

    def _change(self, op: str, operation: Operation) -> Turn:
        before = self._operations
        self._operations = (*before, operation)
        try:
            choice = self._choose(self._operations)
            state = self._folded(choice.strategy)
            prompt = self._render(state, False)
        except Exception:
            self._operations = before
            raise
        plan = self._plan(choice, prompt)
        return self._turn(op, plan, choice, prompt)

    def _compute(
        self,
        op: str,
        operations: tuple[Operation, ...],
        choices: Sequence[str] | None,
        params: SamplingParams | None,
        compare: bool,
        watch: Stopwatch,
    ) -> Turn:
        known = {message.id for message in self._base.template.messages}
        execution, prompt, turn = self._run(operations, choices, watch)
        turn = replace(turn, op=op)
        if choices is not None:
            turn = replace(turn, decision=decide(self.model, execution, choices))
        if compare:
            stale = {**self._base.values, **self._previous}
            turn = self._references.compare(
                turn, execution, prompt, self._base, stale, choices, _new_start(prompt, known)
            )
        if params is None:
            self._keep(execution, prompt)
            return turn
        answer = reply(self.model, execution, params)
        text = "".join(answer)
        message = answer.message(self._new_id())
        cache = answer.cache
        del execution
        turn = replace(turn, text=text, token_ids=answer.token_ids)
        self._keep_reply(prompt, message, cache)
        return turn

    def _run(
        self,
        operations: tuple[Operation, ...],
        choices: Sequence[str] | None,
        watch: Stopwatch,
    ) -> tuple[Execution, TokenizedPrompt, Turn]:
        """Make one plan of all waiting changes and run it; the new state becomes the base."""
        waiting = (*self._operations, *operations)
        choice = self._choose(waiting)
        checker = Checker(self, choice.verify, choices) if choice.verify else None
        rungs = ladder(choice.strategy) if checker else (choice.strategy,)
        tried: list[str] = []
        verification: Verification | None = None
        most = 0
        for rung in rungs:
            state = fold(self._base, waiting, rung, style=self.erratum, mode=self.erratum_mode)
            prompt = self._render(state, True)
            plan = self._plan(replace(choice, strategy=rung), prompt)
            last = rung == rungs[-1]
            execution = self._execute(plan, consume=checker is None or last)
            ttft_ms = watch.elapsed_ms
            tried.append(rung)
            if checker is None:
                break
            agreed, num_tokens = (
                (True, 0) if last else checker.check(execution, prompt, state, self._live)
            )
            most = max(most, num_tokens)
            if agreed:
                share = most / max(1, prompt.num_tokens)
                verification = Verification(checker.level, True, tuple(tried), most, share)
                break
        turn = self._turn("turn", plan, replace(choice, strategy=tried[-1]), prompt)
        turn = replace(turn, ttft_ms=ttft_ms, verification=verification)
        changed = {n: v for n, v in self._base.values.items() if state.values[n] != v}
        self._previous = changed or self._previous
        self._base, self._operations = state, ()
        if choice.compile_after:
            self._compile(state)
        return execution, prompt, turn

    def _execute(self, plan: Plan, *, consume: bool) -> Execution:
        live = self._live
        try:
            return self.model.engine.execute(
                plan,
                base=live.cache if live else None,
                segments=self._segments,
                consume=consume,
            )
        except BaseException:
            if consume:
                self._live = None  # its memory may be half written; the next turn prefills
            raise

    def _plan(self, choice: Choice, prompt: TokenizedPrompt) -> Plan:
        ideal = self.planner.ideal(prompt, cautious=choice.asked == "auto")
        self._segments = ideal.segments
        strategy = choice.strategy
        if choice.keep and not self._still_a_prefix(prompt):
            strategy = "suffix" if choice.asked == "auto" else choice.strategy
        elif choice.keep:
            strategy = "refresh"  # nothing has changed: keep all, compute what is new
        plan = self.planner.plan(strategy, prompt, self._live, ideal)
        return replace(plan, strategy=choice.strategy)

    def _still_a_prefix(self, prompt: TokenizedPrompt) -> bool:
        if self._live is None:
            return True
        ids = self._live.cache.token_ids
        return prompt.token_ids[: len(ids)] == ids

    def _choose(self, operations: Sequence[Operation]) -> Choice:
        waiting = effective(self._base, operations)
        choice = choose(
            waiting, default=self.strategy, scorecard=self.scorecard, engine=self.model.engine
        )
        full = [
            name
            for operation in waiting
            if isinstance(operation, Edit)
            for name in operation.changes
            if self.erratum_mode == "append"
            and choice.strategy == "erratum"
            and num_errata(self._base.template, name) >= MAX_APPENDED_ERRATA
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
        """Fall back to `suffix` while the variant of the new value is not compiled."""
        state = fold(self._base, waiting, "swap", style=self.erratum, mode=self.erratum_mode)
        prompt = self._render(state, False)
        missing = [
            span
            for span in prompt.segments
            if span.variant_values and not self.model.book.find(span)
        ]
        if not missing:
            return choice
        shown = ", ".join(f"{name}={value}" for name, value in missing[0].variant_values)
        return replace(
            choice,
            strategy="suffix",
            compile_after=True,
            fallback_reason=f"segment {missing[0].name!r} has no variant {shown} yet; it is "
            "compiled now",
        )

    def _folded(self, strategy: str | None) -> PromptState:
        if strategy is None:
            strategy = self._choose(self._operations).strategy
        return fold(
            self._base, self._operations, strategy, style=self.erratum, mode=self.erratum_mode
        )

    def _render(self, state: PromptState, add_generation_prompt: bool) -> TokenizedPrompt:
        return state.template.render(
            state.values, self.model.tokenizer, add_generation_prompt=add_generation_prompt
        )

    def _turn(self, op: str, plan: Plan, choice: Choice, prompt: TokenizedPrompt) -> Turn:
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
            fallback_reason=choice.fallback_reason,
            notices=tuple(notices),
        )

    def _keep(self, execution: Execution, prompt: TokenizedPrompt) -> None:
        """Keep the cache of the history, without the generation prompt."""
        history = self._render(self._base, False)
        length = min(execution.cache.length, history.num_tokens)
        if prompt.token_ids[:length] != history.token_ids[:length]:
            length = execution.cache.length
            self._live = Live(execution.cache, blocks_of(prompt))
            return
        self._live = Live(execution.cache.truncated(length), blocks_of(history, length))

    def _keep_reply(self, prompt: TokenizedPrompt, message: Message, cache: KVCache) -> None:
        """Add a generated message to the history and keep the cache that made it."""
        template = self._base.template.append(message)
        self._base = PromptState(template, self._base.values)
        history = self._render(self._base, False)
        if history.token_ids[: cache.length] == cache.token_ids:
            self._live = Live(cache, blocks_of(history, cache.length))
            return
        blocks = [b for b in blocks_of(prompt) if b.key != "generation"]
        start = blocks[-1].stop if blocks else 0
        made = replace(
            blocks[-1], key=f"message:{message.id}", start=start, stop=cache.length, anchors=()
        )
        self._live = Live(cache, (*blocks, made))

    def _compile(self, state: PromptState) -> None:
        """Compile every segment in use, and its declared variants, each in isolation."""
        for values in variant_values(state):
            prompt = PromptTemplate.render(
                state.template, values, self.model.tokenizer, add_generation_prompt=False
            )
            for span in prompt.segments:
                self.model.book.compile(span)
        self._segments = ()

    def _check_values(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            Field(name).check(value, self.model.tokenizer)

    def _new_message(self, role: str, content: str, id: str) -> Message:
        trusted = None if role == "system" else False
        return Message(role=role, content=content, id=id or self._new_id(), trusted=trusted)

    def _new_id(self) -> str:
        taken = {message.id for message in self._base.template.messages}
        while True:
            self._next_id += 1
            name = f"t{self._next_id}"
            if name not in taken:
                return name


def _new_start(prompt: TokenizedPrompt, known: set[str]) -> int:
    """Return where the turn's new text begins: the first message not there before the call."""
    for span in prompt.spans:
        if span.kind == "generation" or (span.kind == "message" and span.name not in known):
            return max(1, min(span.start, prompt.num_tokens - 1))
    return prompt.num_tokens - 1
