"""Decision recovery of every strategy on items a small model decides, and verify's misses.

Each item is a conversation whose field is edited before the question is asked (the
evaluation protocol of MEASURING.md: the query is computed after the edit). Recovery is the
ratio of mean margins (m - m_stale) / (m_clean - m_stale), with a bootstrap interval.
"""

from __future__ import annotations

import random
from importlib import resources
from typing import Any

import yaml
from common import arguments, load, save

import kvnotes
from kvnotes.plan import Match, Plan, clip, plan_keep
from kvnotes.prompt import Message
from kvnotes.session.operations import Edit, Insert, fold
from kvnotes.session.verify import Checker

STRATEGIES = ("stale", "refresh", "selective", "erratum", "refresh+erratum", "suffix", "reprefill")
BOOTSTRAP = 2000


def main() -> None:
    """Run the benchmark."""
    parser = arguments("recovery of every strategy; miss rate of the cheap verify")
    parser.add_argument("--suite", default="capitals12", help="suite name, or `all`")
    parser.add_argument("--verify", action="store_true", help="also measure verify cheap vs full")
    args = parser.parse_args()
    model = load(args)
    text = (resources.files("kvnotes") / "bench/items/attribute_dev.yaml").read_text()
    items = [
        item
        for item in yaml.safe_load(text)["items"]
        if args.suite == "all" or item.get("suite") == args.suite
    ]
    rows = {name: [margin(model, item, name) for item in items] for name in STRATEGIES}
    rows["notes"] = [notes_margin(model, item) for item in items]
    body: dict[str, Any] = {"suite": args.suite, "num_items": len(items), "strategies": {}}
    for name, margins in rows.items():
        body["strategies"][name] = {
            "recovery": recovery(margins, rows["stale"], rows["reprefill"]),
            "interval": interval(margins, rows["stale"], rows["reprefill"]),
            "right": sum(m > 0 for m in margins),
            "mean_margin": sum(margins) / len(margins),
        }
        print(name, body["strategies"][name])
    if args.verify:
        body["verify"] = verify_rates(model, items)
        print(body["verify"])
    save(f"recovery-{args.suite}", args, body)


def session(model: Any, item: dict[str, Any], strategy: str) -> kvnotes.Session:
    """Return a session over an item's prompt, cached up to the question."""
    talk = kvnotes.Session(
        model, messages=item["messages"], fields=item["fields"], strategy=strategy
    )
    talk.decide(item["choices"])
    return talk


def margin(model: Any, item: dict[str, Any], strategy: str) -> float:
    """Return log-probability of the new answer minus the old one's, after the edit."""
    if strategy == "stale":
        talk = session(model, item, "suffix")
    else:
        talk = session(model, item, strategy)
        talk.edit(item["edit"])
    decision = talk.user(item["question"], decide=item["choices"]).decision
    assert decision is not None
    answers = item["answers"]
    return decision.choices[answers["new"]] - decision.choices[answers["old"]]


def notes_margin(model: Any, item: dict[str, Any]) -> float:
    """The paper's `full-downstream` minus the field: old field K/V, notes of the new value.

    Takes the cache of the new value and puts the old value's own K/V back into the field.
    """
    engine, answers = model.engine, item["answers"]
    old = kvnotes.Session(model, messages=item["messages"], fields=item["fields"])
    new = kvnotes.Session(
        model, messages=item["messages"], fields={**item["fields"], **item["edit"]}
    )
    before, after = old.render(), new.render()
    spans = [s for s in before.spans if s.kind == "field"]
    if before.num_tokens != after.num_tokens or len(spans) != 1:
        return float("nan")
    start, stop = spans[0].start, spans[0].stop
    source, target = engine.prefill(before.token_ids), engine.prefill(after.token_ids)
    talk = kvnotes.Session(model, messages=item["messages"], fields=item["fields"])
    talk.add("user", item["question"])
    prompt = talk.render(add_generation_prompt=True)
    kept = before.num_tokens
    layout = (
        *clip(target.cache.layout, 0, start),
        *clip(source.cache.layout, start, stop),
        *clip(target.cache.layout, stop, kept),
    )
    plan = plan_keep(layout, [Match(0, 0, kept)], Plan.prefill(prompt.token_ids), strategy="stale")
    result = engine.execute(plan, segments=[*source.cache.sources, *target.cache.sources])
    encoded = [model.tokenizer.encode(answers[k]) for k in ("new", "old")]
    scores = engine.score(result, encoded)
    return float(scores[0] - scores[1])


def recovery(margins: list[float], stale: list[float], clean: list[float]) -> float:
    """Ratio of mean margins over the items where all three are defined."""
    use = [i for i, m in enumerate(margins) if m == m]
    base = sum(stale[i] for i in use)
    return (sum(margins[i] for i in use) - base) / (sum(clean[i] for i in use) - base)


def interval(margins: list[float], stale: list[float], clean: list[float]) -> list[float]:
    """95 % bootstrap interval over items."""
    rng = random.Random(0)
    use = [i for i, m in enumerate(margins) if m == m]
    values = []
    for _ in range(BOOTSTRAP):
        draw = [rng.choice(use) for _ in use]
        values.append(recovery(*([x[i] for i in draw] for x in (margins, stale, clean))))
    values.sort()
    return [round(values[int(0.025 * BOOTSTRAP)], 3), round(values[int(0.975 * BOOTSTRAP)], 3)]


def verify_rates(model: Any, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the cheap verify with the full one on the same results.

    Besides the two erratum strategies, the stale result itself is checked: it is what a
    verify must not let pass.
    """
    counts = {"num_checks": 0, "wrong_by_full": 0, "missed_by_cheap": 0, "false_alarms_of_cheap": 0}
    share = 0.0
    for item in items:
        for arm in ("stale", "erratum", "refresh+erratum"):
            execution, state, talk, choices = _result(model, item, arm)
            verdicts = {}
            for level in ("full", "cheap"):
                checker = Checker(talk, level, choices)
                verdicts[level], num_tokens = checker.check(execution, state, talk.live)
                if level == "cheap":
                    share = max(share, num_tokens / talk.clean_prompt(state).num_tokens)
            counts["num_checks"] += 1
            counts["wrong_by_full"] += not verdicts["full"]
            counts["missed_by_cheap"] += not verdicts["full"] and verdicts["cheap"]
            counts["false_alarms_of_cheap"] += verdicts["full"] and not verdicts["cheap"]
    return {**counts, "largest_share_computed": round(share, 3)}


def _result(model: Any, item: dict[str, Any], arm: str) -> tuple[Any, Any, Any, Any]:
    """Compute a turn by one strategy; return it with what a checker needs."""
    talk = session(model, item, "suffix")._talk
    question = Insert(Message("user", item["question"], id="question", trusted=False))
    change = Edit(item["edit"], arm)
    style, mode = talk.style, talk.mode
    state = fold(talk.base, (change, question), arm, style=style, mode=mode)
    shown = fold(talk.base, (question,), arm, style=style, mode=mode) if arm == "stale" else state
    prompt = talk.render(shown, True)
    ideal = talk.planner.ideal(prompt, cautious=False)
    plan = talk.planner.plan("refresh", prompt, talk.live, ideal)
    execution = model.engine.execute(plan, base=talk.live.cache)
    return execution, state, talk, [model.tokenizer.encode(c) for c in item["choices"]]


if __name__ == "__main__":
    main()
