"""A rehearsal of a scenario on its bare template, without a model.

Owns what a session would refuse and no tokenizer is needed to see: fields, segments,
message ids and strategies, turn by turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from pydantic import BaseModel

from kvnotes.cli import scenario as form
from kvnotes.cli.parse import located
from kvnotes.cli.source import KeyPath, Source
from kvnotes.errors import (
    KVNotesError,
    MissingFieldError,
    PlanError,
    ScenarioError,
    TemplateError,
    UnknownFieldError,
    nearest,
)
from kvnotes.prompt import Field, Message, PromptTemplate, SegmentText


class Places:
    """Gives errors of the library the place in the file they belong to."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @contextmanager
    def __call__(self, *path: str | int) -> Iterator[None]:
        """Name the place of what is raised inside."""
        try:
            yield
        except KVNotesError as error:
            raise located(error, self._source, path) from error


class Rehearsal:
    """Goes through the turns on the bare template.

    Args:
        source: Where the scenario came from.
        scenario: What it says.
        messages: The prompt it starts with.
        segments: Its segments, by name.
    """

    def __init__(
        self,
        source: Source,
        scenario: form.Scenario,
        messages: tuple[Message, ...],
        segments: Mapping[str, SegmentText],
    ) -> None:
        self._source = source
        self._scenario = scenario
        self._messages = messages
        self._segments = segments
        self._at = Places(source)
        self._num_replies = 0

    def run(self) -> None:
        """Check the prompt, then each turn.

        Raises:
            KVNotesError: The first thing that a session would refuse.
        """
        scenario, at = self._scenario, self._at
        if not any(m.content or m.segment for m in self._messages):
            with at("messages"):
                raise ScenarioError(
                    "the prompt is empty: no message has any text", hint="give one a content"
                )
        with at("messages"):
            self._template = PromptTemplate.chat(self._messages, self._segments.values())
        self._used = {n for m in self._template.messages for n in m.segment_names}
        self._check_fields()
        for name, value in scenario.fields.items():
            with at("fields", name):
                Field(name).check_text(value)
        for name, spec in scenario.segments.items():
            for field, values in spec.variants.items():
                with at("segments", name, "variants", field):
                    for value in values:
                        Field(field).check_text(value)
        self._check_strategy(scenario.strategy, (), ("strategy",))
        for index, turn in enumerate(scenario.turns):
            with at("turns", index):
                self._turn(index, turn)
        self._check_segments_used()

    def _turn(self, index: int, turn: BaseModel) -> None:
        if isinstance(turn, form.EditTurn):
            self._edit(turn)
        elif isinstance(turn, form.DeleteTurn):
            self._check_id(index, turn.delete)
            if len(self._template.messages) == 1:
                raise TemplateError(
                    f"message {turn.delete!r} is the only one left, a prompt needs one",
                    hint="replace it instead",
                )
            self._template = self._template.remove(turn.delete)
            self._check_still_shown(turn.delete)
        elif isinstance(turn, form.MoveTurn):
            self._check_id(index, turn.move)
            if turn.before is not None:
                self._check_id(index, turn.before)
            self._template = self._template.move(turn.move, turn.before)
        elif isinstance(turn, form.ReplaceTurn):
            old = self._check_id(index, turn.replace)
            new = replace(old, content=turn.content)
            self._template = self._template.replace(turn.replace, new)
            self._check_still_shown(turn.replace)
        elif message := added_message(index, turn):
            self._template = self._template.append(message)
            self._used |= set(message.segment_names)
            self._check_slots_filled()
        if getattr(turn, "generate", None) is not None:
            self._num_replies += 1
            reply = Message("assistant", id=f"t{self._num_replies}", trusted=False)
            self._template = self._template.append(reply)

    def _check_id(self, index: int, message_id: str) -> Message:
        """Return the message with an id, if it is there at this turn."""
        ids = [message.id for message in self._template.messages]
        if message_id in ids:
            return self._template.messages[ids.index(message_id)]
        for later, turn in enumerate(self._scenario.turns):
            if getattr(turn, "id", None) == message_id:
                raise TemplateError(
                    f"there is no message {message_id!r} at this turn, turn {later + 1} adds it",
                    hint="put this turn behind it, or name another message"
                    if later >= index
                    else "it has been deleted before",
                )
        raise TemplateError(
            f"there is no message {message_id!r}",
            hint=f"{nearest(message_id, ids)}; a message gets its name by id: name",
        )

    def _edit(self, turn: form.EditTurn) -> None:
        known = self._scenario.fields
        for name, value in turn.edit.items():
            if name not in known:
                raise UnknownFieldError(f"unknown field {name!r}", hint=nearest(name, known))
            Field(name).check_text(value)
        self._check_strategy(turn.strategy or self._scenario.strategy, turn.edit, ())

    def _check_strategy(self, strategy: str, changed: Iterable[str], path: KeyPath) -> None:
        if strategy == "refresh+erratum" and self._scenario.erratum_mode == "append":
            error: KVNotesError = PlanError(
                "strategy 'refresh+erratum' rewrites what is cached, erratum_mode 'append' never "
                "does",
                hint="use strategy erratum, or erratum_mode: rewrite",
            )
            raise located(error, self._source, path) if path else error
        for name in changed if strategy == "swap" else ():
            if not any(name in s.preamble_fields for s in self._segments.values()):
                raise PlanError(
                    f"strategy 'swap' needs a segment with variants of {name!r}, there is none",
                    hint=f"give the segment that judges {name} a preamble and variants: "
                    f"{{{name}: [...]}}",
                )

    def _check_segments_used(self) -> None:
        for name in self._segments:
            if name not in self._used:
                with self._at("segments", name):
                    raise ScenarioError(
                        f"no message uses the segment {name!r}",
                        hint=f"add {{role: system, segment: {name}}} to messages, or remove it",
                    )

    def _check_fields(self) -> None:
        shown, given = self._template.field_names, self._scenario.fields
        for name in given:
            with self._at("fields", name):
                Field(name)
                if name not in shown:
                    raise UnknownFieldError(
                        f"no system message or segment shows the field {name!r}",
                        hint=_slot_hint(name, set(shown) - set(given)),
                    )
        with self._at("fields"):
            self._check_slots_filled()

    def _check_still_shown(self, message_id: str) -> None:
        shown = self._template.field_names
        for name in self._scenario.fields:
            if name not in shown:
                raise UnknownFieldError(
                    f"without message {message_id!r} nothing shows the field {name!r}",
                    hint="keep the message, or show the field elsewhere as well",
                )
        self._check_slots_filled()

    def _check_slots_filled(self) -> None:
        given = self._scenario.fields
        for name in self._template.field_names:
            if name not in given:
                raise MissingFieldError(
                    f"the slot {{{{{name}}}}} has no value",
                    hint=f"add {name}: ... to fields; {nearest(name, given)}",
                )


def added_message(index: int, turn: BaseModel) -> Message | None:
    """Return the message that a turn adds; without an id turn 3 gives it "turn3"."""
    for role in form.MESSAGES:
        content = getattr(turn, role, None)
        if content is not None:
            name = getattr(turn, "id", None) or f"turn{index + 1}"
            # only system messages are templates, as in Session.add
            return Message(role, content, id=name, trusted=None if role == "system" else False)
    return None


def _slot_hint(name: str, unfilled: set[str]) -> str:
    if unfilled and (hint := nearest(name, unfilled)).startswith("did you mean"):
        return f"{hint} (a slot without a value)"
    return f"write {{{{{name}}}}} in a system message or segment, or remove the field"
