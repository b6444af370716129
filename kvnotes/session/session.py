"""One live conversation: template, values, cache.

Owns `Session`, the facade. Changes are collected; the next turn that needs logits makes
one plan of all of them, so an edit costs nothing until it is needed and then one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import get_args

from kvnotes.engine.base import SamplingParams, Stopwatch
from kvnotes.errors import PlanError, TemplateError, UnknownFieldError, nearest
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS, check_strategy
from kvnotes.prompt import ErratumStyle, Message, PromptTemplate, SegmentText, TokenizedPrompt
from kvnotes.session import saved
from kvnotes.session.compare import References
from kvnotes.session.conversation import Conversation
from kvnotes.session.draft import Draft
from kvnotes.session.edits import ErratumMode, PromptState
from kvnotes.session.loaded import Model
from kvnotes.session.operations import Edit, Insert, Operation
from kvnotes.session.planner import Planner, SplicePolicy
from kvnotes.session.reply import Reply, decide, encode_choices, told
from kvnotes.session.report import Turn, Verification
from kvnotes.session.saved import SavedSession
from kvnotes.session.setup import as_message, as_mode, as_segment, check_option
from kvnotes.session.strategy import Scorecard
from kvnotes.session.stream import Stream
from kvnotes.session.verify import Checker
from kvnotes.store import KVStore


class Session(Draft):
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
            None is `rewrite`, and `append` over a server.
        scorecard: What is proved about this model.
        splice: `auto` splices where it pays and skips no notes.
        id: Name of the session in a tree of forks; "" makes a random one.

    Attributes:
        id: The same; may be set.
        parent_id: The session it was forked from, None for a root.

    Raises:
        TemplateError: The template, a field or a value is wrong.
        UnknownSegmentError: A segment is used that is not given.
        PlanError: The model's engine cannot do what is asked for; see its `abilities`.

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
        erratum_mode: ErratumMode | None = None,
        scorecard: Scorecard | None = None,
        splice: SplicePolicy = "auto",
        id: str = "",
    ) -> None:
        self.model = model
        self.id = id or _random_id()
        self.parent_id: str | None = None
        abilities = model.engine.abilities
        check_option("splice", splice, get_args(SplicePolicy))
        abilities.check_splice(splice)
        abilities.check_strategy(check_strategy(strategy))
        mode = as_mode(erratum_mode, abilities)
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
            strategy=strategy,
            style=erratum or ErratumStyle(),
            mode=mode,
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
        if planner.splices:
            self._talk.compile(self._talk.base)
        else:
            self._talk.render(self._talk.base, False)

    # -- the cache -------------------------------------------------------------------------

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache."""
        return self._talk.live.cache.length if self._talk.live else 0

    @property
    def exact(self) -> bool:
        """Whether the cache equals a cold prefill of its tokens, by lineage."""
        return self._talk.live is None or self._talk.live.cache.exact

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
        operation = Insert(self._new_message("user", content, id))
        return self._compute("user", (operation,), decide, generate, compare, watch)

    def decide(self, choices: Sequence[str], *, compare: bool = False) -> Turn:
        """Score choices as the assistant's next words; nothing is added to the history."""
        return self._compute("decide", (), choices, None, compare, Stopwatch())

    def generate(self, params: SamplingParams | None = None, *, compare: bool = False) -> Turn:
        """Generate the assistant's next message."""
        return self._compute("generate", (), None, params or SamplingParams(), compare, Stopwatch())

    def stream(self, params: SamplingParams | None = None) -> Stream:
        """Generate the assistant's next message piece by piece; `turn` says what was reused."""
        return Stream(self._talk, params or SamplingParams(), self._new_id)

    def verify(self) -> Verification:
        """Audit the conversation: one clean prefill, compared with the cache as it is.

        Nothing is changed but that waiting changes are computed; it may run off the request
        path.
        """
        self.model.engine.abilities.check_verify("full")
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
        watch = Stopwatch()
        with self._talk.undone_on_error():
            execution, prompt, turn = self._talk.run((change,), None, watch)
            self._talk.keep(execution, prompt)
        turn = replace(turn, op="consolidate", fallback_reason="consolidated: errata removed")
        return told(turn, execution.exchange, watch)

    # -- on disk ---------------------------------------------------------------------------

    def save(self, store: KVStore | None = None) -> SavedSession:
        """Save the conversation under its id; nothing of it changes.

        A second save, and the save of a fork, write only the K/V that are new.

        Args:
            store: Where; the model's by default.

        Raises:
            StorageError: The store has no folder, or the disk is full: an earlier save stays.
        """
        return saved.save(
            self._talk,
            store or self.model.store,
            id=self.id,
            parent_id=self.parent_id,
            next_id=self._next_id,
        )

    @classmethod
    def load(cls, model: Model, id: str, store: KVStore | None = None) -> Session:
        """Load a saved conversation; the next turn computes its own tokens only.

        Where files of its cache are lost, the next turn computes everything and says why.

        Args:
            model: The model it was saved with.
            id: Its id.
            store: Where; the model's by default.

        Raises:
            StorageError: No session of this id.
            SpecMismatchError: Another model or tokenizer; the message names what differs.
        """
        restored = saved.load(model, store or model.store, id)
        session = object.__new__(cls)
        session.model = model
        session.id, session.parent_id = restored.record.id, restored.record.parent_id
        session._talk = restored.talk
        session._next_id = restored.record.next_id
        session._references = References(model, restored.talk.render)
        return session

    # -- forks -----------------------------------------------------------------------------

    def fork(self, *, id: str = "") -> Session:
        """Return a session that shares everything and goes its own way from here.

        No memory is copied until one of both overwrites what the other reads.

        Args:
            id: Name of the fork; "" makes a random one.
        """
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.id = id or _random_id()
        other.parent_id = self.id
        other._talk = self._talk.fork()
        other._references = References(self.model, other._talk.render)
        return other

    def delegate(
        self,
        prompt: SegmentText | str,
        work: Callable[[Session], str],
        *,
        role: str = "tool",
        values: Mapping[str, str] | None = None,
        id: str = "",
    ) -> Turn:
        """Let a sub-agent work on a fork; only its result comes back, as one message.

        The fork shares the cache: what waits here is computed first, once for both. If `work`
        fails, nothing of it stays. A sub-agent may delegate in its turn.

        Args:
            prompt: The sub-agent's prompt: a segment to splice, or the text of a system message.
            work: Is given the fork, runs its turns, and returns the result.
            role: Role of the result: `tool`, `user` or `assistant`. It is untrusted text.
            values: Values of the fields that come with the prompt.
            id: Id of the result's message.

        Returns:
            A turn whose plan shows what the result adds here.

        Raises:
            PlanError: Another role, or `work` returned no text.
        """
        check_option("role", role, ("tool", "user", "assistant"))
        if self._talk.waiting or self._talk.live is None:
            self._catch_up()
        agent = self.fork()
        if isinstance(prompt, SegmentText):
            agent.splice(prompt, values=values)
        else:
            agent._insert("system", agent._new_message("system", prompt, ""), values=values)
        result: object = work(agent)
        if not isinstance(result, str):
            raise PlanError(
                f"the sub-agent returned a {type(result).__name__}, its result is a text",
                hint="return the text itself; a turn that generated has it as turn.text",
            )
        return self.add(role, result, id=id)

    # -- inside ----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Compute what waits."""
        with self._talk.undone_on_error():
            execution, prompt, _ = self._talk.run((), None, Stopwatch())
            self._talk.keep(execution, prompt)

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
        if compare:
            self.model.engine.abilities.check_held("compare=True")
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
            exchange = execution.exchange
            if params is None:
                talk.keep(execution, prompt)
                return told(turn, exchange, watch)
            answer = Reply(self.model, execution, params)
            del execution
            text = "".join(answer)
            talk.keep_reply(prompt, answer.message(self._new_id()), answer.cache)
            turn = replace(turn, text=text, token_ids=answer.token_ids)
            return told(turn, exchange, watch)


def _random_id() -> str:
    """Return 16 random hex digits."""
    return token_hex(8)


def _new_start(prompt: TokenizedPrompt, known: set[str]) -> int:
    """Return where the turn's new text begins: the first message not there before the call."""
    for span in prompt.spans:
        if span.kind == "generation" or (span.kind == "message" and span.name not in known):
            return max(1, min(span.start, prompt.num_tokens - 1))
    return prompt.num_tokens - 1
