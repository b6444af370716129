"""From a source to a scenario that is ready to run, without a model.

Owns the files that a scenario names, what the command line overrides, and the values of
the library that its keys stand for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvnotes.cli import scenario as form
from kvnotes.cli.parse import parse_scenario
from kvnotes.cli.rehearse import Places, Rehearsal
from kvnotes.cli.source import Source, read_text
from kvnotes.errors import EngineError, ModelNotFoundError, TemplateError, nearest
from kvnotes.plan import check_strategy
from kvnotes.prompt import ErratumStyle, Message, SegmentText

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
    at = Places(source)
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
    Rehearsal(source, scenario, prepared.messages, segments).run()
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
    try:
        return _erratum_style(template, mode)
    except TemplateError as error:
        hint = 'write for example "[UPDATE] {field} is now {{value}}; ignore any earlier value."'
        raise type(error)(error.message, hint=hint) from error


def _erratum_style(template: str, mode: str) -> ErratumStyle:
    bracketed = re.match(r"\[[^\]]*\]", template)
    marker = bracketed[0] if bracketed else re.split(r"\{", template)[0].strip()
    if mode == "append":
        append = template if "{revision}" in template else template + _REVISION
        return ErratumStyle(marker, template.replace("{revision}", "1"), append)
    if "{revision}" in template:
        raise TemplateError("the erratum has {revision}, which only erratum_mode: append counts")
    return ErratumStyle(marker, template, template + _REVISION)


def _segment(source: Source, name: str, spec: form.SegmentSpec) -> SegmentText:
    text = spec.text
    if text is None:
        assert spec.file is not None
        text = read_text(source.folder / spec.file, f"file of segment {name!r}")
    variants = tuple((field, tuple(values)) for field, values in spec.variants.items())
    return SegmentText(name, text, spec.preamble, variants)


def _model(source: Source, name: str) -> str:
    """Return the model's name; a path is relative to the scenario.

    Raises:
        ModelNotFoundError: It can only be a path, and nothing is there.
    """
    path = source.folder / Path(name).expanduser()
    if name == form.DEFAULT_MODEL:
        return name
    if path.exists():
        return str(path)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        with Places(source)("model"):
            raise ModelNotFoundError(
                f"no file or folder {str(path)!r}",
                hint="a path is relative to the scenario's folder; --model takes any path",
            )
    return name


def _chat_template(source: Source, scenario: form.Scenario) -> str | None:
    if scenario.chat_template is None:
        return None
    from kvnotes.prompt.chat import ChatTemplate

    with Places(source)("chat_template"):
        text = read_text(source.folder / scenario.chat_template, "chat template")
        ChatTemplate(text, {})  # refuses what is not jinja
    return text
