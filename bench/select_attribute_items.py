"""Choose attribute items that a small model answers rightly for both values.

An attribute item states a fact early in a prompt (`country: France`), follows it with neutral text, and asks
for something that depends on the fact ("Which city is the capital?"). An edit of the fact can only be judged
on items that the model gets right under a clean prefill of either value, so this script keeps those alone.

How items are chosen, in this order:

1. Candidate pairs of values are listed for every relation, in a fixed order; even ones form the choosing half.
2. Every wording (a question and a form of the answer) is scored on the choosing half. Each relation gets the
   wording with the largest share of pairs right for both values (ties: the larger median of the smaller
   margin). A relation below `MIN_SHARE` is dropped.
3. With the wordings frozen, all candidates are scored; those right for both values by `MIN_MARGIN` nats are
   kept, in order, up to `MAX_ITEMS` a relation. The first twelve capitals with both margins of at least `SUITE_MARGIN` nats form
   the suite `capitals12`.

The model is run by plain transformers: the whole prompt is rendered by the chat template and prefilled, and a
choice is scored by the summed log-probability of its tokens after the generation prompt. Nothing of kvnotes
is imported, so the choice of items cannot depend on the library that is measured with them.

    python bench/select_attribute_items.py --model FOLDER                                  # write the items
    python bench/select_attribute_items.py --model FOLDER --check FILE                     # score frozen items
    python bench/select_attribute_items.py --model FOLDER --scenario examples/retail.yaml  # score its decisions
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from attribute_candidates import RELATIONS, TEMPLATES, Messages, Relation, Wording
from clean_model import CleanModel, Margins, fill

DEFAULT_OUTPUT = Path(__file__).parents[1] / "kvnotes" / "bench" / "items" / "attribute_dev.yaml"
MIN_SHARE = 0.6
MIN_MARGIN = 0.25
MAX_ITEMS = 16
SUITE = "capitals12"
SUITE_SIZE = 12
SUITE_MARGIN = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair of values of one relation, and the template that carries it."""

    relation: Relation
    old: str
    new: str
    template: str
    is_choosing: bool

    @property
    def item_id(self) -> str:
        """Readable and unique within the file."""
        return (
            "-".join([self.relation.name, self.old, self.new, self.template])
            .lower()
            .replace(" ", "_")
        )


def candidates(relation: Relation) -> list[Candidate]:
    """Pair each value with the next one and with the third after it, where the answers differ."""
    values = list(relation.answers)
    pairs = [
        (value, values[(index + step) % len(values)])
        for step in (1, 3)
        for index, value in enumerate(values)
    ]
    differing = [(old, new) for old, new in pairs if relation.answers[old] != relation.answers[new]]
    templates = list(TEMPLATES)
    # Half the index picks the template, so that both halves see every template.
    return [
        Candidate(relation, old, new, templates[index // 2 % len(templates)], index % 2 == 0)
        for index, (old, new) in enumerate(differing)
    ]


def item_of(candidate: Candidate, wording: Wording) -> dict[str, Any]:
    """The item as it stands in the file."""
    relation = candidate.relation
    slot = f"{relation.field}: {{{{{relation.field}}}}}"
    old, new = (
        wording.answer_form.format(relation.answers[value])
        for value in (candidate.old, candidate.new)
    )
    if wording.answer_form == "{}":
        old, new = old[0].upper() + old[1:], new[0].upper() + new[1:]
    return {
        "id": candidate.item_id,
        "relation": relation.name,
        "fields": {relation.field: candidate.old},
        "edit": {relation.field: candidate.new},
        "messages": [
            {"role": message["role"], "content": message["content"].replace("{slot}", slot)}
            for message in TEMPLATES[candidate.template]
        ],
        "question": wording.question,
        "choices": [old, new],
        "answers": {"old": old, "new": new},
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """A relation with the wording chosen for it, or none, and the share right for both values."""

    relation: Relation
    wording: Wording | None
    choosing_share: float


def choose_wording(model: CleanModel, relation: Relation) -> Verdict:
    """Score every wording on the choosing half and take the best."""
    half = [candidate for candidate in candidates(relation) if candidate.is_choosing]
    wordings = relation.wordings()
    measured = [
        model.margins_of_wordings([item_of(candidate, wording) for wording in wordings])
        for candidate in half
    ]
    best: tuple[float, float, Wording] | None = None
    for index, wording in enumerate(wordings):
        smaller = [margins[index].smaller for margins in measured]
        share = sum(margin > 0 for margin in smaller) / len(smaller)
        median = statistics.median(smaller)
        report(
            f"{relation.name}: {share:.2f} median {median:+.2f} | {wording.question} | {wording.answer_form}"
        )
        if best is None or (share, median) > best[:2]:
            best = (share, median, wording)
    assert best is not None, "every relation has a wording"
    share, _, wording = best
    return Verdict(relation, wording if share >= MIN_SHARE else None, share)


def select(model: CleanModel) -> tuple[list[dict[str, Any]], list[str]]:
    """Items to keep, and the lines that say how they were chosen."""
    items: list[dict[str, Any]] = []
    lines: list[str] = []
    for relation in RELATIONS:
        verdict = choose_wording(model, relation)
        if verdict.wording is None:
            lines.append(
                f"{relation.name}: dropped, best wording right for both on {verdict.choosing_share:.2f}"
            )
            continue
        scored = [
            (candidate, item_of(candidate, verdict.wording)) for candidate in candidates(relation)
        ]
        measured = [(candidate, item, model.margins(item)) for candidate, item in scored]
        right = [entry for entry in measured if entry[2].smaller > 0]
        clear = [entry for entry in right if entry[2].smaller >= MIN_MARGIN]
        kept = clear[:MAX_ITEMS]
        if relation.name == "capital":
            kept = mark_suite(clear)
        held_out = [
            margins.smaller > 0 for candidate, _, margins in measured if not candidate.is_choosing
        ]
        lines.append(
            f"{relation.name}: {len(right)} of {len(measured)} candidates right for both "
            f"(choosing half {verdict.choosing_share:.2f}, other half {sum(held_out) / len(held_out):.2f}), "
            f"{len(clear)} clearly; {len(kept)} kept, smallest margin "
            f"{min(margins.smaller for _, _, margins in kept):.2f} nats"
        )
        items += [item for _, item, _ in kept]
    return items, lines


Measured = tuple[Candidate, dict[str, Any], Margins]


def mark_suite(right: Sequence[Measured]) -> list[Measured]:
    """Mark the suite among the capitals, and keep it with the first others up to `MAX_ITEMS`."""
    clear = [entry for entry in right if entry[2].smaller >= SUITE_MARGIN][:SUITE_SIZE]
    if len(clear) < SUITE_SIZE:
        raise SystemExit(
            f"only {len(clear)} capitals have margins of {SUITE_MARGIN} nats; hint: add candidates"
        )
    suite = {entry[1]["id"] for entry in clear}
    for _, item, _ in clear:
        rest = {key: item.pop(key) for key in list(item) if key not in ("id", "relation")}
        item.update(suite=SUITE, **rest)
    others = [entry for entry in right if entry[1]["id"] not in suite][: MAX_ITEMS - SUITE_SIZE]
    return [entry for entry in right if entry in clear or entry in others]


class _Dumper(yaml.SafeDumper):
    """Long text as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def write_items(path: Path, items: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> None:
    """Write the frozen file: how it came about, then the items."""
    header = [
        "Attribute items for development. Frozen: written by bench/select_attribute_items.py, not by hand.",
        "Each is right under a clean prefill for BOTH values, on SmolLM2-135M-Instruct in float32. Wordings were",
        "chosen on half of the candidate pairs (the even ones), by the share right for both values; then frozen.",
        "Both halves use the same values in other pairs, so the other half is no test of unseen values.",
        f"A relation whose best wording is below {MIN_SHARE} was dropped. Kept: the first {MAX_ITEMS} of a relation with",
        f"both margins of at least {MIN_MARGIN} nats, so that rounding does not change which answer is right.",
        f"Suite {SUITE}: the first {SUITE_SIZE} capitals with both margins of at least {SUITE_MARGIN} nats.",
        "Command: python bench/select_attribute_items.py --model FOLDER",
        *lines,
    ]
    body = yaml.dump(
        {"version": 1, "items": list(items)}, Dumper=_Dumper, sort_keys=False, width=120
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"# {line}\n" for line in header) + body, encoding="utf-8")


def check_items(model: CleanModel, path: Path) -> int:
    """Print the margins of every frozen item; return how many are wrong for a value."""
    wrong = 0
    for item in yaml.safe_load(path.read_text(encoding="utf-8"))["items"]:
        margins = model.margins(item)
        wrong += margins.smaller <= 0
        print(f"{item['id']}\t{margins.old:+.2f}\t{margins.new:+.2f}")
    return wrong


def decisions(model: CleanModel, path: Path) -> Iterator[str]:
    """Play a scenario by clean prefills and score each decision for every value its fields take.

    A decided question stays in the history until it is deleted, its choices never enter it. Replies are the
    greedy ones under the values that hold at that turn. A preamble is not part of the prompt.
    """
    scenario = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = {field: str(value) for field, value in scenario["fields"].items()}
    taken = {field: [value] for field, value in values.items()}
    for turn in scenario["turns"]:
        for field, value in turn.get("edit", {}).items():
            taken[field] += [value] if value not in taken[field] else []
    history = [dict(message) for message in scenario["messages"]]

    def render(current: Mapping[str, str]) -> Messages:
        contents = (
            fill(segment_text(scenario["segments"][message["segment"]], path.parent), current)
            if "segment" in message
            else fill(message["content"], current)
            for message in history
        )
        return [
            {"role": m["role"], "content": content}
            for m, content in zip(history, contents, strict=True)
        ]

    for number, turn in enumerate(scenario["turns"], start=1):
        values |= {field: str(value) for field, value in turn.get("edit", {}).items()}
        history = [
            message
            for message in history
            if "delete" not in turn or message.get("id") != turn["delete"]
        ]
        history += [
            {"role": role, "content": turn[role], "id": turn.get("id")}
            for role in ("user", "tool")
            if role in turn
        ]
        if "decide" in turn:
            for field, options in taken.items():
                for value in options if len(options) > 1 else ():
                    scores = model.scores(render({**values, field: value}), turn["decide"])
                    ranked = sorted(zip(scores, turn["decide"], strict=True), reverse=True)
                    ahead = ranked[0][0] - ranked[1][0]
                    yield f"turn {number}: {field}={value}: {ranked[0][1]} leads by {ahead:.2f} nats"
        if "generate" in turn:
            text = model.reply(render(values), turn["generate"]["max_new_tokens"])
            history.append({"role": "assistant", "content": text})
            yield f"turn {number}: reply: {text!r}"
    yield f"{len(model.prompt_ids(render(values)))} tokens at the end"


def segment_text(segment: str | Mapping[str, Any], folder: Path) -> str:
    """The text of a segment, given in the scenario or in a file beside it."""
    if isinstance(segment, str):
        return (folder / segment).read_text(encoding="utf-8")
    if "text" in segment:
        return str(segment["text"])
    return (folder / str(segment["file"])).read_text(encoding="utf-8")


def report(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="model folder, for AutoModelForCausalLM"
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="score the items of this file instead"
    )
    parser.add_argument(
        "--scenario", type=Path, metavar="FILE", help="score the decisions of a scenario instead"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = CleanModel(arguments.model)
    if arguments.scenario:
        for line in decisions(model, arguments.scenario):
            print(line)
        return 0
    if arguments.check:
        return 1 if check_items(model, arguments.check) else 0
    items, lines = select(model)
    write_items(arguments.output, items, lines)
    report(f"{len(items)} items in {arguments.output}\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
