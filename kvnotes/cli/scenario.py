"""The scenario format: what a scenario file may say, as pydantic models.

Owns keys, types and limits, and the JSON Schema made from them. Does not read files and
does not know lines; `load` turns what is raised here into errors with places.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from kvnotes.errors import PlanError, nearest
from kvnotes.plan import STRATEGIES, check_strategy

RESERVED_ID = r"(?:m|t|turn)[0-9]+|erratum:.*"
"""Ids that kvnotes gives: m0 to start messages, turn3 to a turn's, t1 to replies."""

FORMAT = "kvnotes.scenario"
"""Type of our own validation errors; their context holds a hint."""


def fault(message: str, hint: str, *, key: str = "") -> PydanticCustomError:
    """Return a validation error with a hint; `key` is the key that it is about."""
    context = {"message": message, "hint": hint, "key": key}
    return PydanticCustomError(FORMAT, "{message}", context)


def _check_strategy(name: str) -> str:
    try:
        return check_strategy(name)
    except PlanError as error:
        raise fault(error.message, error.hint) from error


def _check_id(name: str) -> str:
    if not name or name != name.strip() or not name.isprintable():
        raise fault(f"the id {name!r} is empty or not one line of text", "use a short word")
    if re.fullmatch(RESERVED_ID, name):
        raise fault(f"the id {name!r} is kept for messages without one", "use another word")
    return name


def _check_choices(choices: list[str]) -> list[str]:
    if len(set(choices)) != len(choices) or not all(choices):
        raise fault(
            f"the choices {', '.join(map(repr, choices))} are not different texts",
            "give two or more, each once, none empty",
        )
    return choices


def _empty_means_defaults(value: Any) -> Any:
    return {} if value == "" else value


_SCALAR = ["string", "number", "boolean"]
Text = Annotated[str, WithJsonSchema({"type": _SCALAR})]
"""Any YAML scalar, taken as the text that was written."""
FieldValue = Annotated[str, WithJsonSchema({"type": [*_SCALAR, "null"]})]
Id = Annotated[str, AfterValidator(_check_id), WithJsonSchema({"type": "string", "minLength": 1})]
StrategyName = Annotated[
    str,
    AfterValidator(_check_strategy),
    WithJsonSchema({"enum": [name for name in STRATEGIES if name != "stale"]}),
]
Choices = Annotated[list[Text], Field(min_length=2), AfterValidator(_check_choices)]
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)
DEFAULT_MODEL = "smollm2-135m"


class _Strict(BaseModel):
    """Unknown keys are errors that name the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    hint = nearest(key, cls.model_fields)
                    raise fault(f"unknown key {key!r}", hint, key=key)
        return data


class Sampling(_Strict):
    """How a reply is generated; greedy unless told. Nothing means the defaults."""

    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """A key without a value is null in YAML."""
        return {"anyOf": [handler.resolve_ref_schema(handler(core_schema)), {"type": "null"}]}


Generate = Annotated[Sampling, BeforeValidator(_empty_means_defaults)]


class SegmentSpec(_Strict):
    """A named text that is compiled once: a file's name, or a mapping."""

    file: str | None = Field(default=None, min_length=1)
    text: Text | None = None
    preamble: Text = ""
    variants: dict[str, Annotated[list[FieldValue], Field(min_length=1)]] = Field(
        default_factory=dict
    )

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_file(cls, data: Any) -> Any:
        return {"file": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _one_text(self) -> SegmentSpec:
        if (self.file is None) == (self.text is None):
            both = "both file and text" if self.file else "neither file nor text"
            raise fault(f"the segment has {both}, it needs one of them", "write {file: policy.md}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """A string stands for {file: string}."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["oneOf"] = [{"required": ["file"]}, {"required": ["text"]}]
        return {"anyOf": [{"type": "string", "minLength": 1}, schema]}


class MessageSpec(_Strict):
    """A message of the prompt the conversation starts with."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    segment: str | None = Field(default=None, min_length=1)
    id: Id | None = None

    @model_validator(mode="after")
    def _one_content(self) -> MessageSpec:
        if (self.content is None) == (self.segment is None):
            both = "both content and segment" if self.segment else "neither content nor segment"
            raise fault(
                f"the message has {both}, it needs one of them",
                "inside content a segment is written {{segment:name}}",
            )
        return self


class _Adding(_Strict):
    id: Id | None = None
    generate: Generate | None = None
    decide: Choices | None = None


class UserTurn(_Adding):
    """A user message, and how it is answered."""

    user: Annotated[Text, Field(min_length=1)]


class ToolTurn(_Adding):
    """A tool result."""

    tool: Text


class SystemTurn(_Adding):
    """A late system message."""

    system: Text


class AssistantTurn(_Adding):
    """An assistant message that was written elsewhere."""

    assistant: Text


class EditTurn(_Strict):
    """New values of fields."""

    edit: Annotated[dict[str, FieldValue], Field(min_length=1)]
    strategy: StrategyName | None = None
    verify: Literal["cheap", "full"] | None = None


class DeleteTurn(_Strict):
    """Remove a message."""

    delete: Annotated[str, Field(min_length=1)]
    strategy: StrategyName | None = None


class MoveTurn(_Strict):
    """Put a message before another one, or at the end."""

    move: Annotated[str, Field(min_length=1)]
    before: Annotated[str, Field(min_length=1)] | None = None
    strategy: StrategyName | None = None


class ReplaceTurn(_Strict):
    """Give a message another text."""

    replace: Annotated[str, Field(min_length=1)]
    content: Text
    strategy: StrategyName | None = None


class GenerateTurn(_Strict):
    """Generate the assistant's next message."""

    generate: Generate


class DecideTurn(_Strict):
    """Score texts as the assistant's next words."""

    decide: Choices


MESSAGES = ("user", "tool", "system", "assistant")
CHANGES = ("edit", "delete", "move", "replace")
ANSWERS = ("generate", "decide")
OPERATIONS = (*MESSAGES, *CHANGES, *ANSWERS)


def operation_of(turn: Any) -> str | None:
    """Return the one operation of a turn, or None where there is none or several clash."""
    if isinstance(turn, BaseModel):
        return next(name for name in OPERATIONS if name in type(turn).model_fields)
    if not isinstance(turn, dict):
        return None
    first = [name for name in (*MESSAGES, *CHANGES) if name in turn]
    answers = [name for name in ANSWERS if name in turn]
    if len(answers) > 1 or len(first) > 1 or (answers and first and first[0] in CHANGES):
        return None
    return next(iter((*first, *answers)), None)


def explain_turn(turn: Any) -> tuple[str, str]:
    """Return what is wrong with a turn that has not one operation, and the way out."""
    if not isinstance(turn, dict):
        return "a turn is a mapping", "write {user: ...}, {edit: {field: value}}, {generate: {}}"
    found = [name for name in OPERATIONS if name in turn]
    if len(found) > 1:
        shown = f"{', '.join(map(repr, found[:-1]))} and {found[-1]!r}"
        return (
            f"the operations {shown} do not go together in one turn",
            "write one turn for each; generate or decide may stand beside a message",
        )
    for key in turn:
        if (hint := nearest(str(key), OPERATIONS)).startswith("did you mean"):
            return f"unknown key {key!r}", hint
    return "the turn has no operation", f"known: {', '.join(OPERATIONS)}"


Turn = Annotated[
    Annotated[UserTurn, Tag("user")]
    | Annotated[ToolTurn, Tag("tool")]
    | Annotated[SystemTurn, Tag("system")]
    | Annotated[AssistantTurn, Tag("assistant")]
    | Annotated[EditTurn, Tag("edit")]
    | Annotated[DeleteTurn, Tag("delete")]
    | Annotated[MoveTurn, Tag("move")]
    | Annotated[ReplaceTurn, Tag("replace")]
    | Annotated[GenerateTurn, Tag("generate")]
    | Annotated[DecideTurn, Tag("decide")],
    Discriminator(operation_of),
]


class Scenario(_Strict):
    """A conversation with edits, to run and to measure."""

    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    dtype: Dtype | None = None
    strategy: StrategyName = "auto"
    num_seam_tokens: int | None = Field(default=None, ge=0)
    erratum: Text | None = None
    erratum_mode: Literal["rewrite", "append"] = "rewrite"
    splice: Literal["auto", "always", "never"] = "auto"
    chat_template: str | None = Field(default=None, min_length=1)
    fields: dict[str, FieldValue] = Field(default_factory=dict)
    segments: dict[str, SegmentSpec] = Field(default_factory=dict)
    messages: Annotated[list[MessageSpec], Field(min_length=1)]
    turns: Annotated[list[Turn], Field(min_length=1)]
