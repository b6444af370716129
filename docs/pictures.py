"""Draw the pictures of the documentation, from real plans and from measured numbers.

    python docs/pictures.py [FOLDER]      write them to docs/pictures, or to another folder

Owns what is drawn of plans and of K/V: plans are those of sessions on the embedded model, K/V are
what it computes. `results.py` draws what was measured, `svg.py` owns how it looks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import measured
from svg import COLORS, OTHER, SEEN, UNSEEN, Drawing

import kvnotes
from kvnotes.plan import Layout, Match, Plan, Reuse, Run, Splice, plan_compose, plan_keep
from kvnotes.prompt import SegmentText, TokenizedPrompt

HERE = Path(__file__).resolve().parent

MEANINGS = {"R": "reused where it stands", "R'": "reused, moved", "C": "computed"}

POLICY = """\
Parcels leave on the working day after the order.
Labels and customs papers are written in the language of the country of delivery.
Standard delivery takes three to five working days, express takes one.
An order can be cancelled until its parcel has left.
"""
HEADER = "You serve an online shop. The policy follows.\n"
ASK, LANGUAGES = "In which language do we write the label?", ["French", "Japanese"]


def main(folder: Path) -> None:
    """Draw everything."""
    folder.mkdir(parents=True, exist_ok=True)
    model = kvnotes.load("smollm2-135m")
    pictures: dict[str, Drawing] = {
        "plans": plans(model),
        "visibility": visibility(),
        "notes": notes(model),
        "rotation": rotation(model),
        **measured(),
    }
    for name, drawing in pictures.items():
        (folder / f"{name}.svg").write_text(drawing.to_svg(), encoding="utf-8")


# -- plans of a real session ---------------------------------------------------------------


def shop(model: kvnotes.Model, **segment: Any) -> kvnotes.Session:
    """Return a conversation of which nothing is computed: header, policy, order."""
    return kvnotes.Session(
        model,
        messages=[
            {"role": "system", "content": HEADER},
            {"role": "system", "segment": "policy", "id": "policy"},
            {"role": "system", "content": "delivery_country: {{country}}\n", "id": "order"},
        ],
        segments={"policy": SegmentText("policy", POLICY, **segment)},
        fields={"country": "France"},
    )


def answered(session: kvnotes.Session) -> kvnotes.Session:
    """Add two turns and compute everything."""
    session.add("user", "Can I still cancel my order?", id="first")
    session.add("assistant", "Yes, until the parcel has left.", id="answer")
    session.user(ASK, decide=LANGUAGES, id="second")
    return session


def plans(model: kvnotes.Model) -> Drawing:
    """What each kind of change does to the cache of one conversation."""
    base = answered(shop(model))
    longer = "the Netherlands"

    def edited(strategy: str) -> Plan:
        fork = base.fork()
        fork.edit(country=longer, strategy=strategy)
        return fork.decide(LANGUAGES).plan

    def changed(change: Callable[[kvnotes.Session], object]) -> Plan:
        fork = base.fork()
        change(fork)
        return fork.decide(LANGUAGES).plan

    tool = json.loads((HERE.parent / "examples/skills/tools/get_order.json").read_text())
    variants = answered(
        shop(
            model,
            preamble="delivery_country: {{country}}\n",
            variants=(("country", ("France", "Japan")),),
        )
    )
    variants.edit(country="Japan", strategy="swap")
    rows = [
        ("compiled policy, new prompt", shop(model).user(ASK, decide=LANGUAGES).plan),
        *((f"edit, {name}", edited(name)) for name in ("reprefill", "suffix", "refresh")),
        *((f"edit, {name}", edited(name)) for name in ("selective", "erratum", "refresh+erratum")),
        ("edit, swap", variants.decide(LANGUAGES).plan),
        ("a tool before the order", changed(lambda fork: fork.add_tool(tool, before="order"))),
        ("a turn deleted", changed(lambda fork: fork.delete("first", strategy="refresh"))),
    ]
    scale = 520 / max(len(plan.token_ids) for _, plan in rows)
    drawing = Drawing(860, 100 + 30 * len(rows), "Plans of one conversation, to scale")
    prompt = base.render(add_generation_prompt=True)
    _parts(drawing, prompt, 190, 62, scale)
    for i, (title, plan) in enumerate(rows):
        y = 76 + 30 * i
        drawing.text(182, y + 14, title, anchor="end")
        _bar(drawing, plan, 190, y, scale)
        counts = plan.tokens
        drawing.text(718, y + 9, f"{counts.reused} reused, {counts.moved} moved,", size=10)
        drawing.text(718, y + 20, f"{counts.computed} computed", size=10)
    _legend(drawing, 190, drawing.height - 14)
    return drawing


def _bar(drawing: Drawing, plan: Plan, x: float, y: float, scale: float) -> None:
    for step in plan.steps:
        kind = plan.step_name(step)
        width = step.num_tokens * scale
        drawing.rect(x + step.target_start * scale, y, width, 20, COLORS[kind])
        if width > 18:
            middle = x + step.target_start * scale + width / 2
            drawing.text(middle, y + 14, kind, anchor="middle", size=11)


def _parts(drawing: Drawing, prompt: TokenizedPrompt, x: float, y: float, scale: float) -> None:
    """Lines over the messages of a prompt, with the field in it."""
    names = {"m0": "header", "policy": "policy", "order": "order", "answer": "two turns"}
    for span in prompt.spans:
        if span.kind == "message":
            left, right = x + span.start * scale, x + span.stop * scale
            drawing.line(left + 1, y, right - 1, y, width=1.5)
            place = (left + right) / 2 - (
                6 if span.name == "order" else -10 * (span.name == "answer")
            )
            drawing.text(place, y - 6, names.get(span.name, ""), anchor="middle", size=10)
        elif span.kind == "field":
            drawing.rect(x + span.start * scale, y - 2, max(2, scale), 4, COLORS["C"])


def _legend(drawing: Drawing, x: float, y: float) -> None:
    for kind, meaning in MEANINGS.items():
        drawing.rect(x, y - 10, 12, 12, COLORS[kind])
        drawing.text(x + 18, y, f"{kind}  {meaning}", size=11)
        x += 180


# -- who saw what --------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One layout, with the letter of each token and what to say about it."""

    title: str
    detail: str
    letters: str
    layout: Layout


def visibility() -> Drawing:
    """For four ways to the same prompt: what each token saw of those before it."""
    old = tuple(range(17))
    new = (*old[:10], 99, *old[11:])
    live = Plan.prefill(old).layout
    around = (Match(0, 0, 10), Match(11, 11, 4))
    longer = (*new[:15], 70, 71, 72, 73, *new[15:])
    erratum = plan_keep(live, around, Plan.prefill(longer), strategy="refresh+erratum")
    policy = Run(old[4:10])
    spliced = plan_compose(new, [Splice("policy", policy, 0, 6, 4)], num_seam_tokens=1)
    refreshed = plan_keep(live, around, Plan.prefill(new), strategy="refresh")
    turns = "hhhhppppppfttttqq"
    panels = [
        Panel("prefill, suffix", "all saw everything", turns, Plan.prefill(new).layout),
        Panel("refresh", "turns saw the old value", turns, refreshed.layout),
        Panel(
            "refresh+erratum", "so they did; a correction", turns[:15] + "eeeeqq", erratum.layout
        ),
        Panel("splice, one seam token", "no header for the policy", turns, spliced.layout),
    ]
    drawing = Drawing(860, 350, "What each token (row) saw of the tokens before it (columns)")
    for i, panel in enumerate(panels):
        _panel(drawing, panel, 40 + 204 * i, 92)
    names = "h header,  p policy,  f field,  t turns,  e erratum,  q question"
    drawing.text(40, drawing.height - 40, names, size=11)
    x, y = 40.0, drawing.height - 16
    for color, meaning in (
        (SEEN, "saw it as it stands there now"),
        (OTHER, "saw another version of it"),
        (UNSEEN, "did not see it"),
    ):
        drawing.rect(x, y - 10, 12, 12, color)
        drawing.text(x + 18, y, meaning, size=11)
        x += 230
    return drawing


def _panel(drawing: Drawing, panel: Panel, x: float, y: float) -> None:
    size = 8.6
    drawing.text(x, y - 26, panel.title, bold=True)
    drawing.text(x, y - 10, panel.detail, size=11)
    held = [_token(view, position) for view in panel.layout for position in _positions(view)]
    cells: dict[str, list[tuple[float, float]]] = {SEEN: [], OTHER: [], UNSEEN: []}
    for row, letter in enumerate(panel.letters):
        seen = _seen(panel.layout, row)
        for column in range(row + 1):
            color = UNSEEN
            if column in seen:
                color = SEEN if seen[column] == held[column] else OTHER
            cells[color].append((x + 12 + column * size, y + row * size))
        drawing.text(x + 4, y + row * size + 7, letter, anchor="middle", size=8)
        foot = y + len(panel.letters) * size + 7
        drawing.text(x + 15.8 + row * size, foot, letter, anchor="middle", size=8)
    for color, places in cells.items():
        drawing.squares(places, size - 1, color)


def _positions(view: Reuse) -> range:
    return range(view.target_start, view.target_stop)


def _token(view: Reuse, position: int) -> Run:
    """The run of the one token that a layout holds at a position."""
    at = position - view.target_start + view.source_start
    return view.run.cut(at, at + 1)


def _seen(layout: Layout, row: int) -> dict[int, Run]:
    """What the token at a position saw, by the column where that stands now."""
    view = next(v for v in layout if v.target_start <= row < v.target_stop)
    own = row - view.target_start + view.source_start
    seen = {
        view.run.start + place + view.shift: view.run.cut(place, place + 1)
        for place in range(own + 1)
    }
    for context in view.run.context:
        for position in _positions(context):
            seen[position + view.shift] = _token(context, position)
    return seen


# -- notes ---------------------------------------------------------------------------------


def notes(model: kvnotes.Model) -> Drawing:
    """How much the values of each later token change when a field changes."""
    text = (
        "delivery_country: {{country}}\n"
        + POLICY
        + "Question: in which language do we write the label?\nAnswer: in"
    )
    prompts = [
        kvnotes.Session(model, text=text, fields={"country": country}).render()
        for country in ("France", "Japan")
    ]
    caches = [model.engine.prefill(prompt.token_ids).cache for prompt in prompts]
    ids = prompts[0].token_ids
    field = next(span for span in prompts[0].spans if span.kind == "field")
    gaps = _gaps(*caches)[field.start :]
    drawing = Drawing(860, 300, "Change of each token's values when France becomes Japan")
    drawing.text(
        40,
        52,
        "SmolLM2-135M, mean over its layers of |new - old| / |old|, by token; the field is red",
        size=11,
    )
    left, bottom, width = 40, 246, 780 / len(gaps)
    largest = max(gaps)
    for i, gap in enumerate(gaps):
        height = 150 * gap / largest
        color = COLORS["C"] if i == 0 else SEEN
        drawing.rect(left + i * width, bottom - height, width - 1, height, color)
        if i == 0 or _is_peak(gaps, i):
            word = model.tokenizer.decode([ids[field.start + i]]).strip(" ")
            shown = f"{word}: {gap:.2f}" if i == 0 else word.replace("\n", "\\n")
            drawing.text(left + i * width, bottom - height - 5, shown, size=10)
    drawing.line(left, bottom, left + 780, bottom)
    drawing.text(left, bottom + 16, f"token {field.start}", size=10)
    drawing.text(left + 780, bottom + 16, f"token {len(ids) - 1}", anchor="end", size=10)
    drawing.text(left + 390, bottom + 34, "position in the prompt", anchor="middle", size=11)
    return drawing


def _is_peak(values: Sequence[float], place: int, reach: int = 3) -> bool:
    """Whether a value is the largest for some places round it; the first is left out."""
    return place > 1 and values[place] == max(values[max(1, place - reach) : place + reach + 1])


def _gaps(old: Any, new: Any) -> list[float]:
    """Mean over layers of the relative change of each token's values."""
    total = torch.zeros(old.length)
    for before, after in zip(old.buffer.values, new.buffer.values, strict=True):
        left = before[:, : old.length].float()
        right = after[:, : old.length].float()
        change = (right - left).pow(2).sum((0, 2)).sqrt()
        total += change / left.pow(2).sum((0, 2)).sqrt()
    return (total / len(old.buffer.values)).tolist()


# -- moving keys ---------------------------------------------------------------------------


def rotation(model: kvnotes.Model) -> Drawing:
    """A key moved from one position to another, pair by pair."""
    source, target = 16, 40
    word = model.tokenizer.encode("language")
    engine, rotary = model.engine, model.engine.rotaries[0]
    layer = engine.prefill((*word, *word)).cache.buffer.keys[0][0, 0].double()
    half = layer.shape[-1] // 2
    pairs = (0, 3, 7, 16)
    drawing = Drawing(860, 280, f"One key of SmolLM2, moved from position {source} to {target}")
    for i, pair in enumerate(pairs):
        cos, sin = rotary.table(torch.tensor([source, target]))
        turns = [math.atan2(float(sin[j, pair]), float(cos[j, pair])) for j in (0, 1)]
        start = math.atan2(float(layer[pair + half]), float(layer[pair])) + turns[0]
        end = start + turns[1] - turns[0]
        frequency = _frequency(rotary.table, pair)
        x, y, radius = 120 + 205 * i, 150, 62
        drawing.circle(x, y, radius)
        for angle, color, name in ((start, COLORS["R"], source), (end, COLORS["C"], target)):
            tip = x + radius * math.cos(angle), y - radius * math.sin(angle)
            drawing.line(x, y, *tip, color=color, width=3)
            away = radius + (13 if name == source or abs(end - start) > 0.3 else 30)
            label = x + away * math.cos(angle), y - away * math.sin(angle) + 4
            drawing.text(*label, str(name), anchor="middle", size=11)
        drawing.text(x, 60, f"dimensions {pair} and {pair + half}", anchor="middle", size=11)
        degrees = math.degrees(frequency) * (target - source)
        drawing.text(
            x,
            246,
            f"{target - source} x {math.degrees(frequency):.2f} = {degrees:.1f} degrees",
            anchor="middle",
            size=11,
        )
    return drawing


def _frequency(table: Callable[[Any], tuple[Any, Any]], pair: int) -> float:
    """Angle of one position in radians."""
    cos, sin = table(torch.tensor([1]))
    return math.atan2(float(sin[0, pair]), float(cos[0, pair]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pictures")
