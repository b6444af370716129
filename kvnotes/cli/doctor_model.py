"""Checking a model: can it be loaded, spliced and edited, and what its prompts can hold.

Owns the order of the checks and what is known after each. A check that fails ends those
that need its result, and no others: a refused model still has a tokenizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from kvnotes.cli.doctor_records import (
    Check,
    GateRecord,
    GateRowRecord,
    LayerRecord,
    LayoutRecord,
    PredictedRecord,
    Section,
    TemplateRecord,
    TokenizerRecord,
)
from kvnotes.cli.explain_records import CostRecord
from kvnotes.cli.listing import size
from kvnotes.cli.run import Say
from kvnotes.cli.table import ms
from kvnotes.errors import EngineError, KVNotesError, UnsupportedModelError
from kvnotes.plan import Plan
from kvnotes.prompt.capabilities import After

if TYPE_CHECKING:
    from kvnotes.engine.base import Engine
    from kvnotes.engine.models import ResolvedModel
    from kvnotes.prompt import PromptTokenizer
    from kvnotes.spec import ModelSpec

SECTION: Section = "model"

NUM_SHORT = 16
"""Tokens of a short pass: a field, an erratum and a question."""

NUM_RUNS = 3

MAX_SHOWN_TOKENS = 6
"""Control tokens that are named in the text; `--json` has all."""

_SPREAD_TOKENS = 1000
_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BEFORE: tuple[After, ...] = ("user", "assistant", "tool")


class ModelCheckup:
    """Checks one model; iterate it once, then read what was found.

    Args:
        name: `smollm2-135m`, a hub id, a folder or a .gguf file.
        dtype: As `kvnotes.load` takes it.
        say: Told what is going on.
    """

    def __init__(self, name: str, dtype: str | None, say: Say) -> None:
        self._name, self._dtype, self._say = name, dtype, say
        self.layout: LayoutRecord | None = None
        self.gate: GateRecord | None = None
        self.cost: CostRecord | None = None
        self.predicted: PredictedRecord | None = None
        self.template: TemplateRecord | None = None
        self.tokenizer: TokenizerRecord | None = None

    def __iter__(self) -> Iterator[Check]:
        """Yield the lines of the checklist."""
        from kvnotes.engine.models import resolve_model

        try:
            resolved = resolve_model(self._name)
        except KVNotesError as error:
            yield Check.fault(SECTION, "model", error)
            return
        yield Check.ok(SECTION, "model", f"{resolved.name}, {resolved.source}, {resolved.path}")
        yield from self._check_engine(resolved)
        yield from self._check_prompts(resolved)

    # -- the model -------------------------------------------------------------------------

    def _check_engine(self, resolved: ResolvedModel) -> Iterator[Check]:
        from kvnotes.engine.loading import load_engine
        from kvnotes.engine.models import DTYPES

        dtype = self._dtype or DTYPES[0]
        try:
            fits = _check_fits(resolved, dtype)
            yield fits
            if fits.status == "fault":
                return
            self._say(f"loading {resolved.name}")
            engine = load_engine(resolved, dtype=dtype).engine
        except KVNotesError as error:
            yield Check.fault(SECTION, "supported", error)
            return
        yield Check.ok(SECTION, "supported", f"{engine.spec.model_type}, loaded in {dtype}")
        yield from self._check_layout(engine)
        copies = engine.copies_because
        read = f"copied to where they are needed: {copies}" if copies else "read where they stand"
        yield Check.ok(SECTION, "compiled K/V", read)
        yield self._check_gate(engine)
        yield from self._check_speed(engine)

    def _check_layout(self, engine: Engine) -> Iterator[Check]:
        spec = engine.spec
        self.layout = _layout(engine)
        shapes = "; ".join(
            f"{layer.layers} layers of {layer.kind} attention{_window(layer)} with "
            f"{layer.kv_heads} kv heads of {layer.head_dim}"
            for layer in self.layout.layers
        )
        yield Check.ok(
            SECTION, "layout", f"{shapes}, {spec.num_attention_heads} heads, {spec.dtype}"
        )
        yield Check.ok(
            SECTION,
            "positions",
            f"rope {self.layout.rope}, pairs {self.layout.rope_pairing}, context "
            f"{spec.max_positions:,} tokens{_because(self.layout.limit_reason)}",
        )
        per_token = self.layout.kv_bytes_per_token
        whole = per_token * spec.max_positions
        fact = f"{size(per_token)} a token, {size(whole)} for a full context"
        available = psutil.virtual_memory().available
        if whole > available:
            yield Check.warning(
                SECTION,
                "K/V",
                f"{fact}, {size(available)} of memory are available",
                "use bfloat16, or keep conversations shorter",
            )
        else:
            yield Check.ok(SECTION, "K/V", fact)

    def _check_gate(self, engine: Engine) -> Check:
        """Splice and edit a probe, and compare with a masked forward."""
        from kvnotes.gate import run_gate

        self._say("splicing and editing a probe")
        found = run_gate(engine)
        self.gate = GateRecord(
            rows=[
                GateRowRecord(
                    case=row.case,
                    tokens=row.num_tokens,
                    gap=_finite(row.gap),
                    tolerance=row.allowed,
                )
                for row in found.rows
            ],
            control=found.control,
        )
        try:
            found.require()
        except UnsupportedModelError as error:
            return Check.fault(SECTION, "splices, edits", error)
        return Check.ok(
            SECTION,
            "splices, edits",
            f"{len(found.rows)} probes of up to {max(row.num_tokens for row in found.rows)} tokens "
            f"differ from a masked forward by {found.worst:.1e} of the logit scale; "
            f"{found.rows[0].allowed:.0e} is allowed, {_control(found.control)}",
        )

    def _check_speed(self, engine: Engine) -> Iterator[Check]:
        cost = engine.cost
        self.cost = CostRecord.of(cost)
        num_tokens = min(_SPREAD_TOKENS, engine.spec.max_positions)
        computed = cost.predict_ms(Plan.prefill((0,) * num_tokens))
        moved = num_tokens * cost.ms_per_moved_token
        scale = _SPREAD_TOKENS / num_tokens
        self.predicted = PredictedRecord(computed_ms=computed * scale, moved_ms=moved * scale)
        yield Check.ok(
            SECTION,
            "predicted cost",
            f"1,000 computed tokens {ms(self.predicted.computed_ms)} ms, moved "
            f"{ms(self.predicted.moved_ms)} ms; {ms(cost.ms_per_pass)} ms for each pass",
        )
        yield from self._check_short_passes(engine)

    def _check_short_passes(self, engine: Engine) -> Iterator[Check]:
        """Compare the threads in use with one, on a pass as short as an edit's."""
        from kvnotes.engine.base import set_num_threads

        num_threads = set_num_threads()
        if num_threads == 1:
            return
        self._say("timing short passes")
        try:
            many = _short_pass_ms(engine)
            set_num_threads(1)
            one = _short_pass_ms(engine)
        finally:
            set_num_threads(num_threads)
        fact = (
            f"a pass of {NUM_SHORT} tokens takes {ms(many)} ms with {num_threads} threads, "
            f"{ms(one)} ms with one"
        )
        if many > one:
            yield Check.warning(SECTION, "short passes", fact, "--threads 1 for edits and splices")
        else:
            yield Check.ok(SECTION, "short passes", fact)

    # -- its prompts -----------------------------------------------------------------------

    def _check_prompts(self, resolved: ResolvedModel) -> Iterator[Check]:
        from kvnotes.engine.models import load_tokenizer
        from kvnotes.prompt import PromptTokenizer

        self._say("reading the tokenizer")
        try:
            tokenizer = PromptTokenizer(load_tokenizer(resolved))
            yield self._check_tokenizer(tokenizer)
            if tokenizer.has_chat_template:
                yield from self._check_template(tokenizer)
                return
        except KVNotesError as error:
            yield Check.fault(SECTION, "tokenizer", error)
            return
        yield Check.warning(
            SECTION,
            "chat template",
            "there is none: only prompts of plain text can be rendered",
            "give a scenario a chat_template, or use PromptTemplate.text_template",
        )

    def _check_tokenizer(self, tokenizer: PromptTokenizer) -> Check:
        controls = sorted(tokenizer.control_strings)
        ends = sorted(tokenizer.token(i) for i in tokenizer.eos_ids)
        self.tokenizer = TokenizerRecord(control_tokens=controls, end_tokens=ends)
        more = len(controls) - MAX_SHOWN_TOKENS
        shown = ", ".join(controls[:MAX_SHOWN_TOKENS]) + (f" and {more} more" if more > 0 else "")
        fact = f"{len(controls)} control tokens ({shown or 'none'})"
        if ends:
            return Check.ok(SECTION, "tokenizer", f"{fact}; a turn ends with {', '.join(ends)}")
        return Check.warning(
            SECTION,
            "tokenizer",
            f"{fact}; none ends a turn, so replies end at their limit",
            "give generate a stop string",
        )

    def _check_template(self, tokenizer: PromptTokenizer) -> Iterator[Check]:
        found = tokenizer.capabilities
        late: dict[str, str] = {before: found.erratum_role(before) for before in _BEFORE}
        self.template = TemplateRecord(
            system=found.system,
            adjacent_system=found.adjacent_system,
            late_system=late,
            prefix_stable=found.prefix_stable,
            shows_time=tokenizer.chat.shows_time,
        )
        yield Check.ok(SECTION, "leading system", _SYSTEM[found.system])
        apart = "stay apart" if found.adjacent_system else "are joined by kvnotes into one"
        yield Check.ok(SECTION, "adjacent system", f"two system messages in a row {apart}")
        yield Check.ok(SECTION, "late system", _late(late))
        yield _check_prefix(found.prefix_stable)
        yield _check_clock(tokenizer.chat.shows_time)


_SYSTEM = {
    "keep": "kept as a message of its own",
    "merged": "merged into a user message by the template",
    "none": "not taken by the template: sent in a user message",
}


def _check_fits(resolved: ResolvedModel, dtype: str) -> Check:
    """Compare the memory that is available with what the weights take."""
    from kvnotes.engine.models import memory_of

    needed, available = memory_of(resolved, dtype)
    fact = f"the weights take {size(needed)} in {dtype}, {size(available)} are available"
    if needed > available:
        hint = "close other programs, or use a smaller model or dtype: bfloat16"
        return Check.fault(SECTION, "memory", EngineError(fact, hint=hint))
    return Check.ok(SECTION, "memory", fact)


def _layout(engine: Engine) -> LayoutRecord:
    spec: ModelSpec = engine.spec
    counts = Counter((x.kind, x.window, x.num_kv_heads, x.head_dim) for x in spec.layers)
    return LayoutRecord(
        model_type=spec.model_type,
        fingerprint=engine.fingerprint,
        dtype=spec.dtype,
        layers=[
            LayerRecord(
                kind=kind, window=window, layers=number, kv_heads=num_heads, head_dim=head_dim
            )
            for (kind, window, num_heads, head_dim), number in counts.items()
        ],
        attention_heads=spec.num_attention_heads,
        rope=", ".join(sorted({rope.kind for rope in spec.ropes})),
        rope_pairing=", ".join(sorted({rope.pairing for rope in spec.ropes})),
        context=spec.max_positions,
        limit_reason=spec.limit_reason,
        kv_bytes_per_token=spec.nbytes_per_token(_ITEM_SIZES[spec.dtype]),
    )


def _window(layer: LayerRecord) -> str:
    if not layer.window:
        return ""
    return f" in chunks of {layer.window}" if layer.kind == "chunked" else f" over {layer.window}"


def _because(reason: str) -> str:
    return f", because {reason}" if reason else ""


def _short_pass_ms(engine: Engine) -> float:
    plan = Plan.prefill(tuple(i % engine.spec.vocab_size for i in range(NUM_SHORT)))
    return median(engine.execute(plan).elapsed_ms for _ in range(NUM_RUNS))


def _late(roles: dict[str, str]) -> str:
    """Say where a late system message stays, and in what it is sent elsewhere."""
    kept = [before for before, role in roles.items() if role == "system"]
    parts = [f"kept in place after {', '.join(kept)}"] if kept else []
    for wrapper in ("user", "tool"):
        sent = [before for before, role in roles.items() if role == wrapper]
        parts += [f"sent in a {wrapper} message after {', '.join(sent)}"] if sent else []
    return "; ".join(parts)


def _check_prefix(stable: bool) -> Check:
    if stable:
        return Check.ok(SECTION, "earlier turns", "a new turn leaves them as they are")
    return Check.warning(
        SECTION,
        "earlier turns",
        "the template rewrites some (it may strip thinking), and they are computed again then",
        "give a scenario a chat_template that leaves them as they are",
    )


def _check_clock(shows_time: bool) -> Check:
    if not shows_time:
        return Check.ok(SECTION, "clock", "the template shows no time")
    return Check.warning(
        SECTION,
        "clock",
        "the template shows the time: frozen in a session, another prefix in each new one",
        "give a scenario a chat_template without it",
    )


def _control(gap: float | None) -> str:
    return "no position is rotated" if gap is None else f"without rotation it is {gap:.1e}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
