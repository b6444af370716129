"""Random trees of sessions that take segments, tools and sub-agents while they run.

A plain list of message ids says what each conversation should hold. What is computed equals
its mask reference; where every change was exact it also has the lineage and the logits of a
new session that was given the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_models import relative_gap
from helpers_session import TOOLS, desk, rebuilt, run, tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvnotes import SegmentText, Session
from kvnotes.fidelity import MECHANICAL_TOLERANCE, mask_reference

pytestmark = BEARTYPE_IN_STRATEGIES

GAP = MECHANICAL_TOLERANCE["float32"]
CHOICES = ("yes", "no way")
MAX_SESSIONS = 4
MAX_MESSAGES = 14

SEGMENTS = (
    SegmentText("policy", "Never sell below the price. " * 5),
    SegmentText("long", "The quick brown fox jumps over the lazy dog, and then it rests. " * 3),
    SegmentText("short", "Be brief."),
    SegmentText("manners", "You are a {{style}} helper, and then it rests. " * 3),
    SegmentText("judged", "If the value is low, say no. " * 4, "status: {{status}}\n"),
)

STRATEGIES = ("auto", "suffix", "refresh", "erratum", "selective", "refresh+erratum")


@dataclass
class Branch:
    """A session, the messages it should have, and whether an erratum may have retracted one."""

    session: Session
    ids: list[str] = field(default_factory=list)
    erratum: bool = False

    @property
    def later(self) -> list[str]:
        """Ids of the messages that may be moved: all but the first."""
        return self.ids[1:]


places = st.integers(0, MAX_MESSAGES)
branches = st.integers(0, MAX_SESSIONS - 1)


class Conversations(RuleBasedStateMachine):
    """A tree of forks; each rule changes one of them."""

    @initialize(exact=st.booleans(), family=st.sampled_from(["smollm2", "smollm2", "llama3"]))
    def start(self, exact: bool, family: str) -> None:
        self.exact = exact
        session = desk(tiny_model(family), TOOLS[:2])
        self.branches = [Branch(session, [message.id for message in session.messages])]

    def pick(self, number: int) -> Branch:
        return self.branches[number % len(self.branches)]

    def strategy(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from(STRATEGIES[: 2 if self.exact else None])))

    def before(self, branch: Branch, place: int) -> str | None:
        """A message but the first, or None for the end."""
        return [*branch.later, None][place % (len(branch.later) + 1)]

    def put(self, branch: Branch, name: str, before: str | None) -> None:
        branch.ids.insert(len(branch.ids) if before is None else branch.ids.index(before), name)

    def settle(self, branch: Branch) -> None:
        """Compute what waits where errata retract: what is deleted with them is certain then."""
        if branch.erratum:
            branch.session.decide(CHOICES)

    # -- segments and tools ------------------------------------------------------------------

    @rule(number=branches, place=places, segment=st.sampled_from(SEGMENTS), data=st.data())
    def splice(self, number: int, place: int, segment: SegmentText, data: st.DataObject) -> None:
        branch = self.pick(number)
        if len(branch.ids) >= MAX_MESSAGES:
            return
        before = self.before(branch, place)
        values = {"style": "short"} if segment.name == "manners" else None
        if values and "style" in branch.session.state.template.field_names:
            values = None
        known = set(branch.ids)
        branch.session.splice(
            segment,
            role=data.draw(st.sampled_from(["system", "user", "assistant"])),
            before=before,
            values=values,
            strategy=self.strategy(data) if before or data.draw(st.booleans()) else None,
        )
        (new,) = {m.id for m in branch.session.messages if not m.is_erratum} - known
        self.put(branch, new, before)

    @rule(number=branches, place=places, data=st.data())
    def add_tool(self, number: int, place: int, data: st.DataObject) -> None:
        branch = self.pick(number)
        free = [schema for schema in TOOLS if schema["name"] not in branch.session.tools]
        if not free or branch.erratum:
            return
        schema = data.draw(st.sampled_from(free))
        before = self.before(branch, place)
        branch.session.add_tool(schema, before=before, strategy=self.strategy(data))
        self.put(branch, branch.session.tools[schema["name"]], before)

    @rule(number=branches, data=st.data())
    def retract_tool(self, number: int, data: st.DataObject) -> None:
        branch = self.pick(number)
        if branch.session.tools:
            name = data.draw(st.sampled_from(list(branch.session.tools)))
            message_id = branch.session.tools[name]
            branch.session.retract_tool(name, strategy=self.strategy(data))
            assert name not in branch.session.tools
            branch.erratum |= any(m.retracts is not None for m in branch.session.messages)
            self.settle(branch)
            if message_id not in {m.id for m in branch.session.messages}:
                branch.ids.remove(message_id)

    @rule(number=branches, data=st.data())
    def reorder_tools(self, number: int, data: st.DataObject) -> None:
        branch = self.pick(number)
        tools = branch.session.tools
        names = data.draw(st.permutations(list(tools)))
        following = iter(names)
        chosen = set(tools.values())
        branch.ids = [tools[next(following)] if i in chosen else i for i in branch.ids]
        branch.session.reorder_tools(names, strategy=self.strategy(data))
        assert list(branch.session.tools) == names

    # -- messages and fields -----------------------------------------------------------------

    @rule(number=branches, place=places, data=st.data())
    def delete(self, number: int, place: int, data: st.DataObject) -> None:
        branch = self.pick(number)
        if len(branch.ids) > 2:
            name = branch.later[place % len(branch.later)]
            branch.session.delete(name, strategy=self.strategy(data))
            branch.ids.remove(name)

    @rule(number=branches, place=places, data=st.data())
    def move(self, number: int, place: int, data: st.DataObject) -> None:
        branch = self.pick(number)
        if branch.later:
            name = data.draw(st.sampled_from(branch.later))
            before = self.before(branch, place)
            branch.session.move(name, before=before, strategy=self.strategy(data))
            if before != name:
                branch.ids.remove(name)
                self.put(branch, name, before)

    @rule(number=branches, value=st.sampled_from(["low", "high", "high and more"]), data=st.data())
    def edit(self, number: int, value: str, data: st.DataObject) -> None:
        branch = self.pick(number)
        # a text that is compiled for its value: a new session compiles it for the new one
        names = ["status"] if self.exact else list(branch.session.values)
        name = data.draw(st.sampled_from(names))
        if self.exact and any(m.segment == "judged" for m in branch.session.messages):
            return
        branch.session.edit({name: value}, strategy=self.strategy(data))
        self.settle(branch)
        held = {m.id for m in branch.session.messages}
        branch.ids = [i for i in branch.ids if i in held]  # what errata had retracted

    @rule(number=branches, role=st.sampled_from(["user", "tool", "assistant"]))
    def add(self, number: int, role: str) -> None:
        branch = self.pick(number)
        branch.session.add(role, "The stock is 12 units.")
        branch.ids.append(branch.session.messages[-1].id)

    # -- turns and trees ---------------------------------------------------------------------

    @rule(number=branches, text=st.sampled_from(["hello", "and now?"]))
    def ask(self, number: int, text: str) -> None:
        branch = self.pick(number)
        if len(branch.ids) < MAX_MESSAGES:
            branch.session.user(text, decide=CHOICES)
            branch.ids.append(branch.session.messages[-1].id)

    @rule(number=branches)
    def answer(self, number: int) -> None:
        self.pick(number).session.decide(CHOICES)

    @precondition(lambda self: len(self.branches) < MAX_SESSIONS)
    @rule(number=branches)
    def fork(self, number: int) -> None:
        branch = self.pick(number)
        fork = branch.session.fork()
        assert fork.parent_id == branch.session.id
        self.branches.append(Branch(fork, list(branch.ids), branch.erratum))

    @rule(number=branches, depth=st.integers(1, 2))
    def delegate(self, number: int, depth: int) -> None:
        branch = self.pick(number)

        def work(agent: Session) -> str:
            agent.user("and now?", decide=CHOICES)
            agent.edit(status="agent")
            if depth == 2:
                agent.delegate("Be brief.", lambda inner: inner.decide(CHOICES).op)
            agent.decide(CHOICES)
            return "It is low."

        if len(branch.ids) < MAX_MESSAGES:
            branch.session.delegate(SEGMENTS[0], work, role="user")
            branch.ids.append(branch.session.messages[-1].id)

    # -- what must hold ------------------------------------------------------------------------

    @rule(number=branches)
    def check(self, number: int) -> None:
        branch = self.pick(number)
        session = branch.session
        assert [m.id for m in session.messages if not m.is_erratum] == branch.ids
        execution = run(session.fork())
        engine = session.model.engine
        reference = mask_reference(engine, execution.cache.layout)
        assert relative_gap(execution.last_logits(), reference) <= GAP
        if self.exact:
            new = run(rebuilt(session))
            assert execution.cache.canonical_layout == new.cache.canonical_layout
            assert relative_gap(execution.last_logits(), new.last_logits()) <= GAP

    def teardown(self) -> None:
        for number in range(len(getattr(self, "branches", ()))):
            self.check(number)


TestConversations: Any = Conversations.TestCase
TestConversations.settings = settings(laws(30), stateful_step_count=18)
