"""What a conversation says, and the changes that wait: nothing is computed here.

Owns `Draft`, the half of a session that is about text: fields, messages, segments, tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from kvnotes.errors import PlanError, TemplateError, UnknownFieldError, nearest
from kvnotes.plan import check_strategy
from kvnotes.prompt import (
    Field,
    Message,
    SegmentText,
    TokenizedPrompt,
    tool_name,
    tool_segment,
)
from kvnotes.session.conversation import Conversation
from kvnotes.session.edits import PromptState
from kvnotes.session.loaded import Model
from kvnotes.session.operations import Delete, Edit, Insert, Move, Replace, reordering
from kvnotes.session.report import Turn
from kvnotes.session.setup import check_brought_values, check_option
from kvnotes.session.verify import VerifyLevel


class Draft:
    """A conversation as text, with changes that take effect when something is computed."""

    model: Model
    _talk: Conversation
    _next_id: int

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
    def tools(self) -> Mapping[str, str]:
        """Id of the message that shows each tool, by the tool's name, in order."""
        retracted = {message.retracts for message in self.messages}
        named = (
            (tool_name(message.segment), message.id)
            for message in self.messages
            if message.segment is not None and message.id not in retracted
        )
        return {name: message_id for name, message_id in named if name is not None}

    def render(self, *, add_generation_prompt: bool = False) -> TokenizedPrompt:
        """Return the prompt as it stands, waiting changes included."""
        return self._talk.render(self.state, add_generation_prompt)

    # -- fields and messages ---------------------------------------------------------------

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
            A turn whose plan is what all waiting changes would do now. Nothing is computed
            yet, but that `selective` scores the notes.
        """
        if verify is not None:
            check_option("verify", verify, get_args(VerifyLevel))
            self.model.engine.abilities.check_verify(verify)
        name = self._strategy(strategy)
        values, known = {**(changes or {}), **fields}, self.values
        for field in values:
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
        return self._talk.change(role, Insert(self._new_message(role, content, id)))

    # -- segments and tools ----------------------------------------------------------------

    def splice(
        self,
        segment: SegmentText | str,
        *,
        role: str = "system",
        id: str = "",
        before: str | None = None,
        values: Mapping[str, str] | None = None,
        strategy: str | None = None,
    ) -> Turn:
        """Add a segment as a message; it is compiled here, once for all sessions of the model.

        Args:
            segment: The segment, or the name of one that the session knows already.
            role: Role of the message.
            id: Id of the message; by default the name of the segment, if that is free.
            before: Id of the message it is put before; None for the end.
            values: Values of the fields that come with it.
            strategy: Instead of the session's: what happens to the messages behind it.

        Returns:
            A turn whose plan shows what is reused, moved and computed.

        Raises:
            TemplateError: The name is in use for another text, or a value is wrong.
            UnknownSegmentError: The session knows no segment of this name.
        """
        if isinstance(segment, str):
            segment = self.state.template.segment(segment)
        message = Message(role, id=id or self._free_id(segment.name), segment=segment.name)
        return self._insert("splice", message, segment, before, values, strategy)

    def add_tool(
        self,
        schema: Mapping[str, object] | SegmentText,
        *,
        before: str | None = None,
        strategy: str | None = None,
    ) -> Turn:
        """Offer a tool: its JSON schema, as a message and a segment of its own.

        Args:
            schema: The schema (see `tool_text`), or what `tool_segment` made of it.
            before: Id of the message it is put before; None for the end.
            strategy: Instead of the session's: what happens to the messages behind it.

        Raises:
            TemplateError: The schema is malformed, holds control text, or its tool is offered.
        """
        segment = schema if isinstance(schema, SegmentText) else tool_segment(schema)
        name = tool_name(segment.name)
        if name is None:
            raise TemplateError(
                f"segment {segment.name!r} is no tool, their names begin with 'tool/'",
                hint="make it with tool_segment(), or add it with splice()",
            )
        if name in self.tools:
            raise TemplateError(
                f"tool {name!r} is offered already, by message {self.tools[name]!r}",
                hint="retract it first",
            )
        control = self._talk.tokenizer.control_text
        found = control.find_marker(segment.text) or control.find_control(segment.text)
        if found:
            raise TemplateError(
                f"tool {name!r} is plain text, but holds the control string {found!r}",
                hint="remove it from the schema; a tool cannot open or end a message",
            )
        message = Message("system", id=self._free_id(segment.name), segment=segment.name)
        return self._insert("add_tool", message, segment, before, None, strategy)

    def retract_tool(self, name: str, *, strategy: str | None = None) -> Turn:
        """Take a tool back.

        Args:
            name: Name of the tool.
            strategy: Instead of the session's. `auto` and the exact ones delete its message:
                the cache is as if it had never been there. `erratum` keeps what is cached and
                adds a message at the end that says so.

        Raises:
            PlanError: No such tool is offered.
        """
        message_id = self._tool(name)
        note_id = self._free_id(f"erratum:tool/{name}")
        note = self._talk.style.retract(name, message_id, id=note_id)
        change = Delete(message_id, self._strategy(strategy), note)
        return self._talk.change("retract_tool", change)

    def reorder_tools(self, names: Sequence[str], *, strategy: str | None = None) -> Turn:
        """Put the tools into another order, in the places that their messages take.

        Args:
            names: Every tool that is offered, once.
            strategy: Instead of the session's: what happens to the messages between them.

        Raises:
            PlanError: A tool is missing, given twice or not offered.
        """
        tools = self.tools
        wanted = [self._tool(name) for name in names]
        if sorted(names) != sorted(tools):
            raise PlanError(
                f"the new order is {', '.join(names) or 'empty'}, the tools are {', '.join(tools)}",
                hint="give each tool once",
            )
        ids = [message.id for message in self.messages if not message.is_erratum]
        moves = reordering(ids, wanted, self._strategy(strategy))
        return self._talk.change("reorder_tools", *moves)

    # -- inside ----------------------------------------------------------------------------

    def _insert(
        self,
        op: str,
        message: Message,
        segment: SegmentText | None = None,
        before: str | None = None,
        values: Mapping[str, str] | None = None,
        strategy: str | None = None,
    ) -> Turn:
        self._refuse_errata(before)
        brought = dict(values or {})
        check_brought_values(self.state, message, segment, brought)
        self._check_values(brought)
        kept = before is None and strategy is None
        name = None if kept else self._strategy(strategy)
        change = Insert(message, before, name, segment, brought)
        return self._talk.change(op, change, segment=segment.name if segment else None)

    def _tool(self, name: str) -> str:
        """Return the message of a tool that is offered."""
        if name not in self.tools:
            raise PlanError(f"no tool {name!r} is offered", hint=nearest(name, self.tools))
        return self.tools[name]

    def _refuse_errata(self, *message_ids: str | None) -> None:
        """Errata follow from edits: another strategy of the same edit has none of them."""
        for message in self.messages:
            if message.is_erratum and message.id in message_ids:
                subject = message.erratum_of if message.retracts is None else message.retracts
                raise PlanError(
                    f"message {message.id!r} is an erratum of {subject!r}; errata "
                    "follow from changes and have no place of their own",
                    hint="change it again, or remove all errata with consolidate()",
                )

    def _strategy(self, name: str | None) -> str:
        strategy = check_strategy(name or self._talk.strategy)
        return self.model.engine.abilities.check_strategy(strategy)

    def _check_values(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            Field(name).check(value, self.model.tokenizer)

    def _new_message(self, role: str, content: str, id: str) -> Message:
        trusted = None if role == "system" else False
        return Message(role=role, content=content, id=id or self._new_id(), trusted=trusted)

    def _free_id(self, name: str) -> str:
        """Return `name` as an id if no message has it, else a new id."""
        return self._new_id() if any(m.id == name for m in self.messages) else name

    def _new_id(self) -> str:
        taken = {message.id for message in self.messages}
        while True:
            self._next_id += 1
            name = f"t{self._next_id}"
            if name not in taken:
                return name
