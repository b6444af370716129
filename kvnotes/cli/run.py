"""Running a prepared scenario: one session call, or two, for each turn.

Owns the way from a scenario's turns to session calls, and repetitions. Prints nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import TYPE_CHECKING

from pydantic import BaseModel

import kvnotes
from kvnotes.cli import scenario as form
from kvnotes.cli.check import Prepared
from kvnotes.cli.parse import located
from kvnotes.cli.records import TurnRecord, turn_record, with_times
from kvnotes.cli.rehearse import added_message
from kvnotes.errors import KVNotesError

if TYPE_CHECKING:
    from kvnotes.engine.base import SamplingParams
    from kvnotes.session import Model, Session, Turn

Say = Callable[[str], None]
"""Told what is going on, for a progress line."""


@dataclass(frozen=True, slots=True)
class Done:
    """A turn that has run.

    Args:
        record: What `--json` says about it.
        title: Operation and text, in words.
        notices: What the reader must know beside the record.
        spread_ms: Smallest and largest TTFT over the repetitions; None without any.
    """

    record: TurnRecord
    title: str
    notices: tuple[str, ...]
    spread_ms: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A segment of the prompt."""

    name: str
    num_tokens: int


class Runner:
    """One scenario on one loaded model.

    Args:
        prepared: The scenario.
        model: What `kvnotes.load` returned.
        compare: Whether references are computed beside each turn.
        repeat: Number of runs; times are medians over them.
        say: Told what is going on.
    """

    def __init__(
        self,
        prepared: Prepared,
        model: Model,
        *,
        compare: bool = True,
        repeat: int = 1,
        say: Say = lambda text: None,
    ) -> None:
        self._prepared = prepared
        self._model = model
        self._compare = compare
        self._repeat = repeat
        self._say = say
        start = time.perf_counter()
        self._say_segments()
        self._session = new_session(self._prepared, self._model)
        self.compile_ms = (time.perf_counter() - start) * 1e3
        spans = self._session.render().segments
        self.compiled = tuple(Compiled(span.name, len(span.token_ids)) for span in spans)

    def __iter__(self) -> Iterator[Done]:
        """Run all turns; yields those of the last repetition, as they finish."""
        earlier = [self._rehearse(n) for n in range(1, self._repeat)]
        suffix = f", run {self._repeat} of {self._repeat}" if earlier else ""
        session = self._session if not earlier else new_session(self._prepared, self._model)
        for index, done in enumerate(self._turns(session, suffix)):
            yield _over([*(run[index] for run in earlier), done])

    def _rehearse(self, number: int) -> list[Done]:
        session = self._session if number == 1 else new_session(self._prepared, self._model)
        return list(self._turns(session, f", run {number} of {self._repeat}"))

    def _turns(self, session: Session, suffix: str) -> Iterator[Done]:
        turns = self._prepared.scenario.turns
        for index, spec in enumerate(turns):
            title = title_of(spec)
            self._say(f"turn {index + 1} of {len(turns)}{suffix}: {title}")
            try:
                turn = run_turn(session, index, spec, compare=self._compare)
            except KVNotesError as error:
                raise located(error, self._prepared.source, ("turns", index)) from error
            record = turn_record(index + 1, str(form.operation_of(spec)), turn)
            yield Done(record, title, (*turn.notices, *_verified(turn)))

    def _say_segments(self) -> None:
        if segments := self._prepared.segments.values():
            sizes = (
                f"{s.name}, about {len(self._model.tokenizer.encode(s.text)):,} tokens"
                for s in segments
            )
            self._say(f"compiling {'; '.join(sizes)}")


def load_prepared(prepared: Prepared, threads: int | None, say: Say) -> tuple[Model, int]:
    """Load a scenario's model; its conversion, on first use, shows a bar of its own.

    Args:
        prepared: The scenario.
        threads: Number of CPU threads; None leaves it to torch.
        say: Told what is going on.

    Returns:
        The model, and how many threads it uses.
    """
    from kvnotes.engine.base import set_num_threads
    from kvnotes.engine.models import resolve_model
    from kvnotes.session import load

    num_threads = set_num_threads(threads)
    resolve_model(prepared.model)
    say(f"loading {prepared.model}")
    model = load(
        prepared.model, dtype=prepared.scenario.dtype, chat_template=prepared.chat_template
    )
    return model, num_threads


def new_session(prepared: Prepared, model: Model) -> Session:
    """Return the session that a scenario starts with.

    Raises:
        KVNotesError: The scenario does not fit the model; the message says where.
    """
    from kvnotes.session import Session

    scenario = prepared.scenario
    try:
        return Session(
            model,
            messages=prepared.messages,
            fields=scenario.fields,
            segments=prepared.segments,
            strategy=scenario.strategy,
            num_seam_tokens=scenario.num_seam_tokens,
            erratum=prepared.style,
            erratum_mode=scenario.erratum_mode,
            splice=scenario.splice,
        )
    except KVNotesError as error:
        raise located(error, prepared.source, ()) from error


def run_turn(session: Session, index: int, spec: BaseModel, *, compare: bool) -> Turn:
    """Do one turn of a scenario."""
    if isinstance(spec, form.EditTurn):
        return session.edit(spec.edit, strategy=spec.strategy, verify=spec.verify)
    if isinstance(spec, form.DeleteTurn):
        return session.delete(spec.delete, strategy=spec.strategy)
    if isinstance(spec, form.MoveTurn):
        return session.move(spec.move, before=spec.before, strategy=spec.strategy)
    if isinstance(spec, form.ReplaceTurn):
        return session.replace(spec.replace, spec.content, strategy=spec.strategy)
    choices: Sequence[str] | None = getattr(spec, "decide", None)
    sampling = _sampling(getattr(spec, "generate", None))
    message = added_message(index, spec)
    if message is not None and message.role == "user":
        return session.user(
            message.content, id=message.id, decide=choices, generate=sampling, compare=compare
        )
    if message is not None:
        added = session.add(message.role, message.content, id=message.id)
        if choices is None and sampling is None:
            return added
    if choices is not None:
        return session.decide(choices, compare=compare)
    return session.generate(sampling, compare=compare)


def title_of(spec: BaseModel) -> str:
    """Return a turn in words: its operation and its text."""
    op = str(form.operation_of(spec))
    if isinstance(spec, form.EditTurn):
        return "edit " + ", ".join(f"{name} = {value}" for name, value in spec.edit.items())
    if isinstance(spec, form.MoveTurn):
        target = "to the end" if spec.before is None else f"before {spec.before}"
        return f"move {spec.move} {target}"
    if isinstance(spec, form.ReplaceTurn):
        return f"replace {spec.replace}: {spec.content}"
    if isinstance(spec, form.DeleteTurn):
        return f"delete {spec.delete}"
    message = added_message(0, spec)
    return op if message is None else f"{op}: {message.content}"


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    result = {"kvnotes": kvnotes.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def _verified(turn: Turn) -> Iterator[str]:
    """Say how a verify went."""
    if (done := turn.verification) is not None:
        outcome = "agreed with" if done.agreed else "differs from"
        yield (
            f"verify {done.level}: {done.rungs[-1]} {outcome} the check, tried "
            f"{', '.join(done.rungs)}; it computed {done.checked_share:.0%} of the prompt"
        )


def _sampling(spec: form.Sampling | None) -> SamplingParams | None:
    if spec is None:
        return None
    from kvnotes.engine.base import SamplingParams

    return SamplingParams(**{**spec.model_dump(), "stop": tuple(spec.stop)})


def _over(runs: list[Done]) -> Done:
    """Return the last run's turn with median times over all runs."""
    last = runs[-1]
    if len(runs) == 1:
        return last

    def middle(name: str) -> float | None:
        times = [t for run in runs if (t := getattr(run.record, name)) is not None]
        return median(times) if times else None

    record = with_times(
        last.record,
        ttft=middle("ttft_ms"),
        hit=middle("prefix_hit_ttft_ms"),
        full=middle("full_ttft_ms"),
    )
    times = [run.record.ttft_ms for run in runs if run.record.ttft_ms is not None]
    spread = (min(times), max(times)) if times else None
    return Done(record, last.title, last.notices, spread)
