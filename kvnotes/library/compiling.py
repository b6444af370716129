"""From skills to compiled segments: what there is to do, what it costs, doing it.

Owns `CompilePlan`. A plan is made of token ids alone and is shown before anything runs;
what the store has already is not compiled again, also after a changed file, a new version
or another model: the key follows from tokens, preamble and model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from math import prod

from kvnotes.engine.base import Stopwatch, set_num_threads
from kvnotes.errors import PlanError
from kvnotes.library.skill import INLINE, Skill
from kvnotes.plan import Plan, Run
from kvnotes.prompt import Message, PromptTemplate, SegmentSpan
from kvnotes.session import Model
from kvnotes.session.book import run_of

DEFAULT_MAX_VARIANTS = 64
"""Most variants of one skill that are compiled unasked: a product of fields grows fast."""

FIRST_MESSAGE = Message("system", "-", id="first")
"""Stands before a skill that is compiled as a later message."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One segment to be compiled: a skill with values for its fields.

    Args:
        skill: The skill.
        values: Values of all its fields.
        span: Its tokens and those of its preamble.
        present: The store has it.
    """

    skill: Skill
    values: Mapping[str, str]
    span: SegmentSpan
    present: bool

    @property
    def run(self) -> Run:
        """The run that its K/V have."""
        return run_of(self.span)

    @property
    def variant(self) -> str:
        """The values of the fields that tell variants apart, in words."""
        return ", ".join(f"{name}={value}" for name, value in self.span.variant_values)


@dataclass(frozen=True, slots=True)
class SkillCost:
    """What compiling one skill takes.

    Args:
        skill: The skill.
        num_variants: Combinations of the values of its fields.
        num_units: Segments: more than variants where a template shows a first message otherwise.
        num_present: Those that the store has.
        num_tokens: Tokens of one segment, the largest.
        nbytes: Bytes of all its segments in the store.
        predicted_ms: Time to compile those that are missing.
        skipped: Why it is not compiled now; "" if it is.
    """

    skill: Skill
    num_variants: int
    num_units: int
    num_present: int
    num_tokens: int
    nbytes: int
    predicted_ms: float
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """All there is to do for some skills on one model."""

    units: tuple[Unit, ...]
    costs: tuple[SkillCost, ...]

    @property
    def missing(self) -> tuple[Unit, ...]:
        """What would be compiled."""
        return tuple(unit for unit in self.units if not unit.present)

    @property
    def predicted_ms(self) -> float:
        """Predicted time of one worker."""
        return sum(cost.predicted_ms for cost in self.costs)

    @property
    def nbytes(self) -> int:
        """Bytes of everything, in the store."""
        return sum(cost.nbytes for cost in self.costs)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A unit that is done.

    Args:
        unit: What was asked for.
        elapsed_ms: Time it took, waiting for another process that compiles it included.
        num_done: Units done so far.
    """

    unit: Unit
    elapsed_ms: float
    num_done: int


def plan_compile(
    model: Model,
    skills: Sequence[Skill],
    *,
    int8: bool = False,
    max_variants: int = DEFAULT_MAX_VARIANTS,
) -> CompilePlan:
    """Find out what compiling some skills takes; runs nothing.

    Args:
        model: What they are compiled for.
        skills: With their versions.
        int8: They are stored in 8 bits.
        max_variants: More variants of one skill than this are refused.

    Raises:
        PlanError: Too many variants; the message says what they would cost.
        TemplateError: The chat template or the tokenizer refuses a text.
    """
    units: list[Unit] = []
    costs: list[SkillCost] = []
    for skill in skills:
        found, skipped = _units(model, skill, int8=int8, max_variants=max_variants)
        units += found
        costs.append(_cost(model, skill, found, skipped, int8=int8))
    return CompilePlan(tuple(units), tuple(costs))


def compile_units(
    model: Model, units: Sequence[Unit], *, workers: int = 1, int8: bool = False
) -> Iterator[Compiled]:
    """Compile units and keep them in the model's store; yields each as it is done.

    Args:
        model: Compiles.
        units: Those that are missing.
        workers: Segments that are compiled at once; the CPU's threads are shared among them.
        int8: Store them in 8 bits.

    Raises:
        StorageError: One cannot be stored; those that are done stay.
    """
    before = set_num_threads()
    set_num_threads(max(1, before // workers))
    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(_compile, model, unit, int8): unit for unit in units}
        num_done = 0
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                num_done += 1
                yield Compiled(waiting.pop(future), future.result(), num_done)
    finally:
        pool.shutdown(cancel_futures=True)
        set_num_threads(before)


def compiling_forms(model: Model, skill: Skill, values: Mapping[str, str]) -> list[SegmentSpan]:
    """Return the segments that a skill is in a prompt: as its first message and as a later one.

    Many templates show both alike; then there is one.
    """
    if not model.tokenizer.has_chat_template:
        templates = [
            PromptTemplate.text_template(f"{{{{segment:{skill.ref}}}}}", segments=[skill.segment])
        ]
    else:
        message = skill.message(id="skill")
        starts: list[tuple[Message, ...]] = [(), (FIRST_MESSAGE,)]
        if skill.role not in ("system", INLINE):
            starts = starts[1:]
        if skill.role == "tool":
            starts = [(FIRST_MESSAGE, Message("user", "-"), Message("assistant", "-"))]
        templates = [
            PromptTemplate.chat([*start, message], segments=[skill.segment]) for start in starts
        ]
    found: dict[Run, SegmentSpan] = {}
    for template in templates:
        for span in template.render(values, model.tokenizer).segments:
            found.setdefault(run_of(span), span)
    return list(found.values())


def _units(model: Model, skill: Skill, *, int8: bool, max_variants: int) -> tuple[list[Unit], str]:
    given = dict(skill.fields)
    varied = dict(skill.variants) if skill.compile == "eager" else {}
    if skill.compile == "lazy":
        given = {**{name: values[0] for name, values in skill.variants}, **given}
    unset = [name for name in skill.field_names if name not in given and name not in varied]
    if unset:
        return [], f"its field {unset[0]!r} has no value; it is compiled on its first use"
    num_variants = prod(len(values) for values in varied.values())
    if num_variants > max_variants:
        raise PlanError(_too_many(model, skill, varied, num_variants, max_variants), hint=_MANY)
    units: dict[Run, Unit] = {}
    for combination in product(*varied.values()):
        values = {**given, **dict(zip(varied, combination, strict=True))}
        for span in compiling_forms(model, skill, values):
            run = run_of(span)
            units[run] = Unit(skill, values, span, _present(model, run, int8))
    return list(units.values()), ""


_MANY = (
    'give fewer values, set compile = "lazy" to compile each on its first use, or raise '
    "--max-variants"
)


def _too_many(
    model: Model, skill: Skill, varied: Mapping[str, tuple[str, ...]], count: int, most: int
) -> str:
    values = {**dict(skill.fields), **{name: v[0] for name, v in varied.items()}}
    span = compiling_forms(model, skill, values)[0]
    one = _predicted_ms(model, span)
    factors = " x ".join(f"{name}({len(v)})" for name, v in varied.items())
    nbytes = count * _nbytes(model, span, int8=False)
    return (
        f"skill {skill.ref!r} has {factors} = {count} variants of {len(span.token_ids)} tokens: "
        f"{nbytes / 1e6:,.0f} MB and about {count * one / 1e3:,.0f} s; at most {most} are "
        "compiled unasked"
    )


def _cost(
    model: Model, skill: Skill, units: Sequence[Unit], skipped: str, *, int8: bool
) -> SkillCost:
    return SkillCost(
        skill,
        num_variants=len({unit.variant for unit in units}),
        num_units=len(units),
        num_present=sum(unit.present for unit in units),
        num_tokens=max((len(unit.span.token_ids) for unit in units), default=0),
        nbytes=sum(_nbytes(model, unit.span, int8=int8) for unit in units),
        predicted_ms=sum((_predicted_ms(model, u.span) for u in units if not u.present), 0.0),
        skipped=skipped,
    )


def _predicted_ms(model: Model, span: SegmentSpan) -> float:
    whole = (*span.preamble_ids, *span.token_ids)
    return model.engine.cost.predict_ms(Plan.prefill(whole))


def _nbytes(model: Model, span: SegmentSpan, *, int8: bool) -> int:
    spec = model.engine.spec
    itemsize = 1 if int8 else {"float32": 4}.get(spec.dtype, 2)
    return len(span.token_ids) * spec.nbytes_per_token(itemsize)


def _present(model: Model, run: Run, int8: bool) -> bool:
    identity = model.engine.identity
    if int8:
        run = Run(run.token_ids, run.start, run.context, f"int8:{identity.spec.dtype}")
    return model.store.has(identity, run) is not None


def _compile(model: Model, unit: Unit, int8: bool) -> float:
    watch = Stopwatch()
    if int8:
        segment = model.engine.compile(unit.span.token_ids, unit.span.preamble_ids)
        model.store.put(segment, model.book.provenance(unit.span), int8=True)
    else:
        model.book.compile(unit.span, strict=True)
    return watch.elapsed_ms
