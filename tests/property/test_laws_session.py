"""Random conversations: edits, deletions, moves, forks, streams, in any order.

After every step the live cache holds the tokens of the history, equals its mask reference,
and the conversation shows the values it should.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_models import relative_gap, same_kv, snapshot
from helpers_session import POLICY, run, shop, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvnotes import SamplingParams, SegmentText, Session
from kvnotes.errors import KVNotesError, TemplateError
from kvnotes.fidelity import MECHANICAL_TOLERANCE, mask_reference
from kvnotes.session import Turn

pytestmark = BEARTYPE_IN_STRATEGIES

GAP = MECHANICAL_TOLERANCE["float32"]
CHOICES = ("yes", "no way")
VALUES = ("low", "high", "mid", "high and more", "", "10:45")
EXACT = ("suffix", "reprefill")
APPENDING = ("auto", "suffix", "reprefill", "erratum", "refresh", "selective")
REWRITING = (*APPENDING, "refresh+erratum")
TEXTS = ("hello", "and now?", "The price is 10:45.", "never")


FIELDS = {"status": "low", "tier": "gold"}


def field_in_segment(**options: object) -> Session:
    """The segment itself shows a field; the other field stands before it."""
    return Session(
        tiny_model(),
        messages=[
            {"role": "system", "content": "You help a {{tier}} customer.\n"},
            {"role": "system", "segment": "policy"},
            {"role": "system", "content": "Be brief.\n"},
        ],
        fields=FIELDS,
        segments={"policy": POLICY + "The stock is {{status}}. " + POLICY},
        **options,  # type: ignore[arg-type]
    )


def with_variants(**options: object) -> Session:
    """The segment is compiled once per value of the field that stands before it."""
    values = ("low", "high", "mid")
    policy = SegmentText("policy", POLICY, "status: {{status}}\n", (("status", values),))
    return Session(
        tiny_model(),
        messages=[
            {"role": "system", "content": "You help. status: {{status}}\n"},
            {"role": "system", "segment": "policy"},
            {"role": "system", "content": "tier: {{tier}}\n"},
        ],
        fields=FIELDS,
        segments={"policy": policy},
        **options,  # type: ignore[arg-type]
    )


def text_template(**options: object) -> Session:
    """No chat template: one text with a segment in its middle."""
    text = "You help. tier: {{tier}}\n{{segment:policy}}\nstatus: {{status}}\n"
    return Session(
        tiny_model(),
        text=text,
        fields=FIELDS,
        segments={"policy": POLICY},
        **options,  # type: ignore[arg-type]
    )


BUILDERS = {
    "field in a segment": field_in_segment,
    "variants": with_variants,
    "text": text_template,
}


@dataclass
class Walk:
    """A session and what should be true of it."""

    data: st.DataObject
    session: Session
    mode: str
    splice: str
    values: dict[str, str] = field(default_factory=lambda: dict(FIELDS))
    held: list[tuple[Session, list[Tensor], tuple[int, ...]]] = field(default_factory=list)

    def draw(self, *options: object) -> object:
        return self.data.draw(st.sampled_from(options))

    def strategy(self) -> str:
        return str(self.draw(*(REWRITING if self.mode == "rewrite" else APPENDING)))

    def swap(self) -> None:
        value = str(self.draw("low", "high", "mid", "new"))
        self.session.edit(status=value, strategy="swap")
        self.values["status"] = value

    # -- steps -----------------------------------------------------------------------------

    def edit(self) -> None:
        names = self.draw(("status",), ("tier",), ("status", "tier"))
        changes = {name: str(self.draw(*VALUES)) for name in names}  # type: ignore[attr-defined]
        verify = self.draw(None, None, None, "cheap", "full")
        self.session.edit(changes, strategy=self.strategy(), verify=verify)  # type: ignore[arg-type]
        self.values.update(changes)

    def delete(self) -> None:
        if not self.session.messages:
            return
        chosen = self.draw(*(m.id for m in self.session.messages))
        if any(m.id == chosen and m.role in ("user", "assistant") for m in self.session.messages):
            self.session.delete(str(chosen), strategy=self.strategy())

    def move(self) -> None:
        ids = [message.id for message in self.session.messages if not message.erratum_of]
        if not ids:
            return
        before = self.draw(None, *ids)
        self.session.move(str(self.draw(*ids)), before=before, strategy=self.strategy())  # type: ignore[arg-type]

    def replace(self) -> None:
        users = [m.id for m in self.session.messages if m.role == "user" and not m.erratum_of]
        if users:
            text, where = str(self.draw(*TEXTS)), str(self.draw(*users))
            self.session.replace(where, text, strategy=self.strategy())

    def add(self) -> None:
        self.session.add(str(self.draw("user", "tool")), str(self.draw(*TEXTS)))

    def ask(self) -> None:
        text, compared = str(self.draw(*TEXTS)), self.draw(False, False, True)
        self.turn(self.session.user(text, decide=CHOICES, compare=bool(compared)))

    def decide(self) -> None:
        self.turn(self.session.decide(CHOICES))

    def generate(self) -> None:
        params = SamplingParams(
            int(str(self.draw(1, 3, 6))),
            temperature=float(str(self.draw(0.0, 1.3))),
            stop=self.draw((), ("e",), ("the",)),  # type: ignore[arg-type]
        )
        self.turn(self.session.generate(params))

    def stream(self) -> None:
        stream = self.session.stream(SamplingParams(5))
        for _ in range(int(str(self.draw(0, 1, 9)))):
            if next(stream, None) is None:
                break
        stream.close()  # type: ignore[attr-defined]

    def fork(self) -> None:
        """Go on with the fork; the original keeps what it has."""
        other = self.session.fork()
        live = self.session._talk.live
        if live is not None and live.cache.length:
            self.held.append((self.session, snapshot(live.cache), live.cache.token_ids))
        self.session = other

    def consolidate(self) -> None:
        self.session.consolidate()
        assert not any(m.erratum_of or m.pinned for m in self.session.messages)

    # -- what must hold --------------------------------------------------------------------

    def turn(self, turn: Turn) -> None:
        counts = turn.plan.tokens
        assert counts.reused + counts.moved + counts.computed == counts.total
        assert turn.plan.yields_logits
        if turn.strategy in EXACT and turn.fallback_reason is None and self.splice == "never":
            assert turn.plan.exact or turn.evidence.detail.startswith("nothing is changed")

    def check(self) -> None:
        session = self.session
        assert dict(session.values) == self.values
        live = session._talk.live
        if live is not None and live.cache.length and not session._talk.waiting:
            history = session.render().token_ids
            assert history[: live.cache.length] == live.cache.token_ids or self.rewritten()
        for old, kept, ids in self.held:
            cache = old._talk.live.cache  # type: ignore[union-attr]
            assert cache.token_ids == ids and same_kv(snapshot(cache), kept)
        self.check_statements()

    def check_statements(self) -> None:
        for name, value in self.values.items():
            spans = self.session.render().field_spans(name)
            errata = {m.id for m in self.session.messages if m.erratum_of == name}
            stated = [span.value for span in spans if span.message_id in errata]
            if stated:
                assert stated[-1] == value
                assert self.mode == "append" or set(stated) == {value}
            elif spans:
                template = self.session.state.template
                pinned = {m.id for m in template.messages if name in dict(m.pinned)}
                pinned |= {""} if name in dict(template.pinned) else set()
                shown = {span.value for span in spans if span.message_id not in pinned}
                assert shown <= {value}

    def rewritten(self) -> bool:
        """Whether a reply is shown otherwise than it was generated: cut, or by the template."""
        if self.session.render().rewrites:
            return True
        return any(m.role == "assistant" and not m.generated_ids for m in self.session.messages)

    def check_logits(self) -> None:
        """What the session computes next equals the oracle; exact ones also a cold prefill."""
        execution = run(self.session.fork())
        engine = self.session.model.engine
        reference = mask_reference(engine, execution.cache.layout)
        assert relative_gap(execution.last_logits(), reference) < GAP
        if execution.cache.exact:
            cold = engine.prefill(execution.cache.token_ids).last_logits()
            assert relative_gap(execution.last_logits(), cold) < GAP


STEPS = ("edit", "edit", "delete", "move", "replace", "add", "ask", "ask", "decide", "generate")
LATER = (*STEPS, "stream", "fork", "consolidate")


def walk(data: st.DataObject, family: str, num_steps: int, builder: str = "") -> None:
    mode = data.draw(st.sampled_from(["rewrite", "append"]), label="mode")
    splice = data.draw(st.sampled_from(["always", "never"]), label="splice")
    default = data.draw(st.sampled_from(["auto", "erratum", "refresh"]), label="default")
    if builder:
        session = BUILDERS[builder](erratum_mode=mode, splice=splice, strategy=default)
    else:
        session = shop(tiny_model(family), erratum_mode=mode, splice=splice, strategy=default)
    going = Walk(data, session, mode, splice)
    going.ask()
    steps = (*LATER, "swap", "swap") if builder == "variants" else LATER
    for _ in range(num_steps):
        step = data.draw(st.sampled_from(steps), label="step")
        before = (going.session.messages, dict(going.session.values))
        try:
            getattr(going, step)()
        except KVNotesError as error:
            assert error.hint, error
            assert isinstance(error, TemplateError), error  # a template that takes no such order
            assert (going.session.messages, dict(going.session.values)) == before
        going.check()
    going.check_logits()


@laws(40)
@given(data=st.data(), num_steps=st.integers(1, 8))
def test_any_conversation_keeps_the_cache_of_its_history(
    data: st.DataObject, num_steps: int
) -> None:
    walk(data, "smollm2", num_steps)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral", "gemma", "deepseek"])
@laws(8)
@given(data=st.data(), num_steps=st.integers(1, 6))
def test_any_conversation_in_other_templates(
    family: str, data: st.DataObject, num_steps: int
) -> None:
    walk(data, family, num_steps)


@pytest.mark.parametrize("builder", BUILDERS)
@laws(12)
@given(data=st.data(), num_steps=st.integers(1, 7))
def test_any_conversation_round_other_segments(
    builder: str, data: st.DataObject, num_steps: int
) -> None:
    walk(data, "smollm2", num_steps, builder)
