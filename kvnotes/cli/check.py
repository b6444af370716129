"""What can be wrong with a scenario beside its form, found without a model.

Owns the files a scenario names, its prompt template, and a rehearsal of its turns on that
template: ids, fields and segments are resolved as a session would.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pydantic import BaseModel

from kvnotes.cli import scenario as form
from kvnotes.cli.parse import located, parse_scenario
from kvnotes.cli.source import Path_, Source, read_text
from kvnotes.errors import (
    EngineError,
    FieldValueError,
    KVNotesError,
    MissingFieldError,
    PlanError,
    ScenarioError,
    TemplateError,
    UnknownFieldError,
    nearest,
)
from kvnotes.plan import check_strategy
from kvnotes.prompt import ErratumStyle, Field, Message, PromptTemplate, SegmentText
from kvnotes.prompt.slots import Slot, parse

_REVISION = " (revision {revision}, replaces all earlier)"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario with its files read, ready for a session.

    Args:
        source: Where it came from.
        scenario: What it says, with what the command line says instead.
        model: Name or path of its model.
        messages: The prompt it starts with.
        segments: Its segments, by name.
        style: Wording of its errata.
        chat_template: Jinja text used in place of the model's own.
    """

    source: Source
    scenario: form.Scenario
    model: str
    messages: tuple[Message, ...]
    segments: Mapping[str, SegmentText]
    style: ErratumStyle
    chat_template: str | None

    @property
    def summary(self) -> str:
        """How many turns, fields and segments there are."""
        counts = {
            "turn": len(self.scenario.turns),
            "field": len(self.scenario.fields),
            "segment": len(self.segments),
        }
        return ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items())


def prepare(source: Source, overrides: Mapping[str, str | None] | None = None) -> Prepared:
    """Parse and check a scenario; no model and no tokenizer is needed.

    Args:
        source: The file.
        overrides: `strategy`, `model` and `dtype` of the command line; None changes nothing.

    Raises:
        ScenarioError: It is malformed, or a file it names cannot be read.
        TemplateError: A field, a value or a message id does not fit its prompt.
        UnknownSegmentError: A message uses a segment that is not declared.
        PlanError: A strategy that cannot be followed here.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    scenario = overridden(parse_scenario(source), given)
    at = _Places(source)
    with at("erratum"):
        style = erratum_style(scenario.erratum, scenario.erratum_mode)
    segments = {}
    for name, spec in scenario.segments.items():
        with at("segments", name):
            segments[name] = _segment(source, name, spec)
    messages = []
    for index, message in enumerate(scenario.messages):
        with at("messages", index):
            messages.append(
                Message(
                    message.role,
                    message.content or "",
                    id=message.id or "",
                    segment=message.segment,
                )
            )
    prepared = Prepared(
        source,
        scenario,
        given["model"] if "model" in given else _model(source, scenario.model),
        tuple(messages),
        segments,
        style,
        _chat_template(source, scenario),
    )
    _Rehearsal(prepared, at).run()
    return prepared


def overridden(scenario: form.Scenario, given: Mapping[str, str]) -> form.Scenario:
    """Return the scenario with what the command line says.

    Raises:
        PlanError: No such strategy.
        EngineError: No such dtype.
    """
    if "strategy" in given:
        check_strategy(given["strategy"])
    if "dtype" in given and given["dtype"] not in form.DTYPES:
        raise EngineError(f"no dtype {given['dtype']!r}", hint=nearest(given["dtype"], form.DTYPES))
    return scenario.model_copy(update=dict(given))


def erratum_style(template: str | None, mode: str) -> ErratumStyle:
    """Return the style that an `erratum:` string stands for.

    The marker is the text in brackets that it begins with, else all before `{field}`.
    """
    if template is None:
        return ErratumStyle()
    bracketed = re.match(r"\[[^\]]*\]", template)
    marker = bracketed[0] if bracketed else re.split(r"\{", template)[0].strip()
    if mode == "append":
        append = template if "{revision}" in template else template + _REVISION
        return ErratumStyle(marker, template.replace("{revision}", "1"), append)
    if "{revision}" in template:
        raise TemplateError(
            "the erratum has {revision}, and erratum_mode is rewrite, which keeps one erratum",
            hint="remove {revision}, or set erratum_mode: append",
        )
    return ErratumStyle(marker, template, template + _REVISION)


class _Places:
    """Gives errors of the library the place in the file they belong to."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @contextmanager
    def __call__(self, *path: str | int) -> Iterator[None]:
        try:
            yield
        except KVNotesError as error:
            raise located(error, self._source, path) from error


class _Rehearsal:
    """Goes through the turns on the bare template."""

    def __init__(self, prepared: Prepared, at: _Places) -> None:
        self._prepared = prepared
        self._scenario = prepared.scenario
        self._at = at
        self._num_replies = 0

    def run(self) -> None:
        """Check the prompt, then each turn.

        Raises:
            KVNotesError: The first thing that a session would refuse.
        """
        scenario, at = self._scenario, self._at
        if not any(m.content or m.segment for m in self._prepared.messages):
            with at("messages"):
                raise ScenarioError(
                    "the prompt is empty: no message has any text", hint="give one a content"
                )
        with at("messages"):
            self._template = PromptTemplate.chat(
                self._prepared.messages, self._prepared.segments.values()
            )
        self._used = _segments_used(self._template.messages)
        self._check_fields()
        for name, value in scenario.fields.items():
            with at("fields", name):
                check_value(name, value)
        for name, spec in scenario.segments.items():
            for field, values in spec.variants.items():
                with at("segments", name, "variants", field):
                    for value in values:
                        check_value(field, value)
        self._check_strategy(scenario.strategy, (), ("strategy",))
        for index, turn in enumerate(scenario.turns):
            with at("turns", index):
                self._turn(index, turn)
        self._check_segments_used()

    def _turn(self, index: int, turn: BaseModel) -> None:
        if isinstance(turn, form.EditTurn):
            self._edit(turn)
        elif isinstance(turn, form.DeleteTurn):
            self._template = self._template.remove(turn.delete)
            self._check_still_shown(turn.delete)
        elif isinstance(turn, form.MoveTurn):
            self._template = self._template.move(turn.move, turn.before)
        elif isinstance(turn, form.ReplaceTurn):
            old = next((m for m in self._template.messages if m.id == turn.replace), None)
            new = replace(old, content=turn.content) if old else Message("user", turn.content)
            self._template = self._template.replace(turn.replace, new)
            self._check_still_shown(turn.replace)
        elif message := added_message(index, turn):
            self._template = self._template.append(message)
            self._used |= _segments_used([message])
            self._check_slots_filled()
        if getattr(turn, "generate", None) is not None:
            self._num_replies += 1
            reply = Message("assistant", id=f"t{self._num_replies}", trusted=False)
            self._template = self._template.append(reply)

    def _edit(self, turn: form.EditTurn) -> None:
        known = self._scenario.fields
        for name, value in turn.edit.items():
            if name not in known:
                raise UnknownFieldError(f"unknown field {name!r}", hint=nearest(name, known))
            check_value(name, value)
        self._check_strategy(turn.strategy or self._scenario.strategy, turn.edit, ())

    def _check_strategy(self, strategy: str, changed: Iterable[str], path: Path_) -> None:
        if strategy == "refresh+erratum" and self._scenario.erratum_mode == "append":
            error: KVNotesError = PlanError(
                "strategy 'refresh+erratum' rewrites cached tokens, erratum_mode 'append' never does",
                hint="use strategy erratum, or erratum_mode: rewrite",
            )
            raise located(error, self._prepared.source, path) if path else error
        for name in changed if strategy == "swap" else ():
            if not any(name in _preamble_fields(s) for s in self._prepared.segments.values()):
                raise PlanError(
                    f"strategy 'swap' needs a segment with variants of {name!r}, there is none",
                    hint=f"give the segment that judges {name} a preamble and variants: "
                    f"{{{name}: [...]}}",
                )

    def _check_segments_used(self) -> None:
        for name in self._prepared.segments:
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


def check_value(name: str, value: str) -> None:
    """Refuse what no tokenizer is needed to refuse; `Field.check` adds control strings.

    Raises:
        FieldValueError: Several lines, or too long.
    """
    most = Field(name).max_chars
    if len(value) > most:
        raise FieldValueError(
            f"value of field {name!r} has {len(value)} characters, the limit is {most}",
            hint="shorten the value, or put long text into a segment",
        )
    if len(value.splitlines()) > 1 or value != value.strip(
        "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    ):
        raise FieldValueError(
            f"value of field {name!r} has several lines, a value is one line",
            hint="join the lines; in YAML, > and | make text with line breaks, >- makes one line",
        )


def _segment(source: Source, name: str, spec: form.SegmentSpec) -> SegmentText:
    text = spec.text
    if text is None:
        assert spec.file is not None
        text = read_text(source.folder / spec.file, f"file of segment {name!r}")
    variants = tuple((field, tuple(values)) for field, values in spec.variants.items())
    return SegmentText(name, text, spec.preamble, variants)


def _model(source: Source, name: str) -> str:
    """Return the model's name; a path is relative to the scenario."""
    path = source.folder / name
    if name == form.DEFAULT_MODEL or not path.exists():
        return name
    return str(path)


def _chat_template(source: Source, scenario: form.Scenario) -> str | None:
    if scenario.chat_template is None:
        return None
    from kvnotes.prompt.chat import ChatTemplate

    with _Places(source)("chat_template"):
        text = read_text(source.folder / scenario.chat_template, "chat template")
        ChatTemplate(text, {})  # refuses what is not jinja
    return text


def _segments_used(messages: Iterable[Message]) -> set[str]:
    whole = {message.segment for message in messages if message.segment}
    parts = (part for m in messages if m.is_trusted for part in parse(m.content, ""))
    return whole | {p.name for p in parts if isinstance(p, Slot) and p.kind == "segment"}


def _preamble_fields(segment: SegmentText) -> set[str]:
    return {part.name for part in segment.preamble_parts() if isinstance(part, Slot)}


def _slot_hint(name: str, unfilled: set[str]) -> str:
    if unfilled and (hint := nearest(name, unfilled)).startswith("did you mean"):
        return f"{hint} (a slot without a value)"
    return f"write {{{{{name}}}}} in a system message or segment, or remove the field"
