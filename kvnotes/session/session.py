"""One live conversation: template, values, cache.

Owns `Session`, the facade. Changes are collected; the next turn that needs logits makes
one plan of all of them, so an edit costs nothing until it is needed and then one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import get_args

from kvnotes.engine.base import SamplingParams, Stopwatch
from kvnotes.errors import PlanError, TemplateError, UnknownFieldError, nearest
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS, check_strategy
from kvnotes.prompt import (
    ErratumStyle,
    Field,
    Message,
    PromptTemplate,
    SegmentText,
    TokenizedPrompt,
)
from kvnotes.session.compare import References
from kvnotes.session.conversation import Conversation
from kvnotes.session.edits import ErratumMode, PromptState
from kvnotes.session.loaded import Model
from kvnotes.session.operations import Append, Delete, Edit, Move, Operation, Replace
from kvnotes.session.planner import Planner, SplicePolicy
from kvnotes.session.reply import Reply, decide, encode_choices
from kvnotes.session.report import Turn, Verification
from kvnotes.session.setup import as_message, as_segment, check_option
from kvnotes.session.strategy import Scorecard
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
        check_option("splice", splice, get_args(SplicePolicy))
        check_option("erratum_mode", erratum_mode, get_args(ErratumMode))
        if text is not None and messages:
            raise TemplateError(
                f"both text and {len(messages)} messages are given", hint="give one of them"
            )
        parts = tuple(as_segment(name, value) for name, value in (segments or {}).items())
        template = (
            PromptTemplate.text_template(text, segments=parts)
            if text is not None
            else PromptTemplate.chat([as_message(m) for m in messages], segments=parts)
        )
        if num_seam_tokens is None:
            num_seam_tokens = scorecard.num_seam_tokens if scorecard else DEFAULT_NUM_SEAM_TOKENS
        planner = Planner(model, num_seam_tokens=num_seam_tokens, splice=splice)
        self._talk = Conversation(
            model,
            PromptState(template, dict(fields or {})),
            planner,
            strategy=check_strategy(strategy),
            style=erratum or ErratumStyle(),
            mode=erratum_mode,
            scorecard=scorecard,
        )
        self._references = References(model, self._talk.render)
        self._next_id = 0
        self._check_values(self._talk.base.values)
        for name in self._talk.base.values:
            if name not in template.field_names:
                raise UnknownFieldError(
                    f"a value is given for {name!r}, no message or segment has that field",
                    hint=nearest(name, template.field_names),
                )
        if splice == "never":
            self._talk.render(self._talk.base, False)
        else:
            self._talk.compile(self._talk.base)

    # -- what the conversation is now ------------------------------------------------------

    @property
    def state(self) -> PromptState:
        """Template and values with all waiting changes."""
        return self._talk.folded(None)

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
        return self._talk.live.cache.length if self._talk.live else 0

    @property
    def exact(self) -> bool:
        """Whether the cache equals a cold prefill of its tokens, by lineage."""
        return self._talk.live is None or self._talk.live.cache.exact

    def render(self, *, add_generation_prompt: bool = False) -> TokenizedPrompt:
        """Return the prompt as it stands, waiting changes included."""
        return self._talk.render(self.state, add_generation_prompt)

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
            A turn whose plan is what the edit alone would do now. Nothing is computed yet,
            but that `selective` scores the notes.
        """
        if verify is not None:
            check_option("verify", verify, get_args(VerifyLevel))
        name = self._strategy(strategy)
        values = {**(changes or {}), **fields}
        for field in values:
            known = self._talk.base.values
            if field not in known:
                raise UnknownFieldError(f"unknown field {field!r}", hint=nearest(field, known))
        self._check_values(values)
        return self._talk.change("edit", Edit(values, name, verify))

    def delete(self, message_id: str, *, strategy: str | None = None) -> Turn:
        """Remove a message; under `auto`, `suffix` and `reprefill` its notes go as well."""
        self._refuse_errata(message_id)
        return self._talk.change("delete", Delete(message_id, self._strategy(strategy)))

    def move(self, message_id: str, *, before: str | None, strategy: str | None = None) -> Turn:
        """Put a message before another one, or (None) at the end."""
        self._refuse_errata(message_id, before)
        return self._talk.change("move", Move(message_id, before, self._strategy(strategy)))

    def replace(self, message_id: str, content: str, *, strategy: str | None = None) -> Turn:
        """Give a message another text."""
        self._refuse_errata(message_id)
        change = Replace(message_id, content, self._strategy(strategy))
        return self._talk.change("replace", change)

    def add(self, role: str, content: str, *, id: str = "") -> Turn:
        """Add a message; it is computed with the next turn that needs logits."""
        return self._talk.change(role, Append(self._new_message(role, content, id)))

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
        """Generate the assistant's next message piece by piece.

        The history has the message at the end, and what was generated if the caller stops.
        """
        params = params or SamplingParams()
        talk, watch = self._talk, Stopwatch()
        with talk.undone_on_error():
            execution, prompt, _ = talk.run((), None, watch, reserve=params.max_new_tokens)
            answer = Reply(self.model, execution, params)
            del execution
            with suppress(GeneratorExit):
                yield from answer
            talk.keep_reply(prompt, answer.message(self._new_id()), answer.cache)

    def verify(self) -> Verification:
        """Audit the conversation: one clean prefill, compared with the cache as it is.

        Nothing is changed but that waiting changes are computed; it may run off the request
        path.
        """
        with self._talk.undone_on_error():
            execution, prompt, _ = self._talk.run((), None, Stopwatch())
            checker = Checker(self._talk, "full", None)
            agreed, num_tokens = checker.check(execution, self._talk.base, None)
            self._talk.keep(execution, prompt)
        share = num_tokens / max(1, prompt.num_tokens)
        return Verification("full", agreed, (), num_tokens, share)

    def consolidate(self) -> Turn:
        """Make the cache clean by `suffix`: no errata, no stale notes. For idle time."""
        change = Edit({}, "suffix", consolidate=True)
        with self._talk.undone_on_error():
            execution, prompt, turn = self._talk.run((change,), None, Stopwatch())
            self._talk.keep(execution, prompt)
        return replace(turn, op="consolidate", fallback_reason="consolidated: errata removed")

    def fork(self) -> Session:
        """Return a session that shares everything and goes its own way from here."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other._talk = self._talk.fork()
        other._references = References(self.model, other._talk.render)
        return other

    # -- inside ----------------------------------------------------------------------------

    def _compute(
        self,
        op: str,
        operations: tuple[Operation, ...],
        choices: Sequence[str] | None,
        params: SamplingParams | None,
        compare: bool,
        watch: Stopwatch,
    ) -> Turn:
        talk = self._talk
        known = {message.id for message in talk.base.template.messages}
        encoded = encode_choices(self.model, choices) if choices is not None else None
        reserve = params.max_new_tokens if params else 0
        with talk.undone_on_error():
            execution, prompt, turn = talk.run(operations, encoded, watch, reserve=reserve)
            turn = replace(turn, op=op)
            if choices is not None:
                turn = replace(turn, decision=decide(self.model, execution, choices))
            if compare:
                stale = {**talk.base.values, **talk.previous}
                new_start = _new_start(prompt, known)
                turn = self._references.compare(
                    turn, execution, prompt, talk.base, stale, choices, new_start
                )
            if params is None:
                talk.keep(execution, prompt)
                return turn
            answer = Reply(self.model, execution, params)
            del execution
            text = "".join(answer)
            talk.keep_reply(prompt, answer.message(self._new_id()), answer.cache)
            return replace(turn, text=text, token_ids=answer.token_ids)

    def _refuse_errata(self, *message_ids: str | None) -> None:
        """Errata follow from edits: another strategy of the same edit has none of them."""
        for message in self.messages:
            if message.erratum_of and message.id in message_ids:
                raise PlanError(
                    f"message {message.id!r} is an erratum of {message.erratum_of!r}; errata "
                    "follow from edits and have no place of their own",
                    hint="edit the field again, or remove all errata with consolidate()",
                )

    def _strategy(self, name: str | None) -> str:
        return check_strategy(name or self._talk.strategy)

    def _check_values(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            Field(name).check(value, self.model.tokenizer)

    def _new_message(self, role: str, content: str, id: str) -> Message:
        trusted = None if role == "system" else False
        return Message(role=role, content=content, id=id or self._new_id(), trusted=trusted)

    def _new_id(self) -> str:
        taken = {message.id for message in self.messages}
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
