"""Write docs/benchmarks.md from the results in bench/results: no number without its command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kvnotes.bench.result import shown, threads_of

RESULTS = Path(__file__).resolve().parent / "results"
PLOTS = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "bench"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Written by `python bench/report.py` from `bench/results/*.json`; each section names the command
that made its numbers. `make bench` runs them all. References, floors and timing follow one
protocol: arms interleaved in one process, one thread, medians of five runs and more after a
warm-up with minimum and maximum, blocks repeated while a probe says that the machine is busy.
"""


def main() -> None:
    """Write the page."""
    parts = [HEAD]
    for pattern, title in BENCHES.items():
        for path in sorted(RESULTS.glob(f"{pattern}-*.json")):
            parts.append(_bench(json.loads(path.read_text()), title, _plot(path)))
    for name, write in (
        ("prefill", _prefill),
        ("fidelity", _fidelity),
        ("recovery", _recovery),
        ("store", _store),
        ("tools", _tools),
        ("images", _images),
        ("predict", _predict),
        ("lint", _lint),
    ):
        for path in sorted(RESULTS.glob(f"{name}*.json")):
            parts.append(write(json.loads(path.read_text())))
    notes = Path(__file__).resolve().parent / "notes.md"
    if notes.exists():
        parts.append(notes.read_text())
    PAGE.write_text("\n".join(part.rstrip() + "\n" for part in parts))


def _machine(result: dict[str, Any]) -> str:
    m = result["machine"]
    return (
        f"`{m['command']}`  \n{m['date']}, {m['cpu']}, {m['cores']} cores, {m['threads']} "
        f"thread(s), {m['dtype']}, torch {m['torch']}, transformers {m['transformers']}\n"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _ms(value: dict[str, float] | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    median, low, high = (f"{value[k]:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} [{low}-{high}]"


BENCHES = {
    "cli/compose": "Time to first token of a splice",
    "peers/compose": "Other methods, and other numbers of new tokens",
    "short/compose": "When a splice pays",
    "cli/decode": "Time per token",
    "cli/share": "Conversations over one segment",
    "cli/edit": "Time to first token after an edit",
    "cli/store": "A segment as a file",
    "serve/serve": "A vLLM server while a value changes in every request",
}
"""What `kvnotes bench` measured, by the place of its results."""


def _plot(path: Path) -> str:
    """Copy the plot of a result to the pages; return its name there."""
    plot, name = path.with_suffix(".svg"), f"{path.parent.name}-{path.stem}.svg"
    if not plot.exists():
        return ""
    PLOTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(plot, PLOTS / name)
    return name


def _bench(result: dict[str, Any], title: str, plot: str) -> str:
    """Return the section of a result of `kvnotes bench`."""
    m = result["machine"]
    parts = [f"## {title}, {m['dtype']}, {threads_of(m)}\n", _machine(result)]
    if plot:
        parts.append(f"![{title}, plotted](pictures/bench/{plot})\n")
    for table in result["tables"]:
        names = list(dict.fromkeys(name for row in table["rows"] for name in row))
        rows = [[shown(row.get(name)) for name in names] for row in table["rows"]]
        parts.append(f"{_sentence(table['title'])}. {table['note']}\n\n{_table(names, rows)}")
    grown = {name: value for name, value in result["exponents"].items() if value is not None}
    if grown:
        rows = [[name, f"{value:.2f}"] for name, value in grown.items()]
        head = "How costs grow: the exponent of the power law that fits best.\n\n"
        parts.append(head + _table(["cost", "exponent"], rows))
    return "\n".join(parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _prefill(result: dict[str, Any]) -> str:
    rows = [
        [str(r["tokens"]), name, _ms(value)]
        for r in result["rows"]
        for name, value in sorted(r["arms"].items(), key=lambda arm: arm[1]["median"])
    ]
    return (
        f"## The fastest exact prefill, {result['machine']['dtype']}\n\n{_machine(result)}\n"
        "Attention kernel and tokens per forward, fastest first; the engine uses "
        "`kvnotes_packed` in chunks of 512.\n\n" + _table(["tokens", "kernel, chunk", "ms"], rows)
    )


def _fidelity(result: dict[str, Any]) -> str:
    rows = [
        [
            h.get("form", "-"),
            str(h["header_tokens"]),
            str(r["num_seam_tokens"]),
            f"{r['kl_mean']:.6f}",
            f"{r['kl_median']:.6f}",
            f"{r['kl_max']:.5f}",
            f"{r['top1_equal']} / {r['num_requests']}",
            f"{r['cosine_min']:.5f}",
        ]
        for h in result["headers"]
        for r in h["rows"]
    ]
    floor = result["floor_kl"]
    gaps = [
        [str(i + 1)] + [f"{g[k]:.1e}" for k in sorted(g)]
        for i, g in enumerate(result["mechanical"])
    ]
    names = sorted(result["mechanical"][0]) if result["mechanical"] else []
    return (
        f"## Splice fidelity on the retail policy, {result['machine']['dtype']}\n\n"
        f"{_machine(result)}\nThe policy spliced behind three ordinary headers, against an "
        f"exact prefix hit of the same tokens. Floor (exact hit against one-shot prefill, "
        f"{floor['num']} requests): median {floor['median']:.1e}, maximum {floor['max']:.1e} "
        "nats.\n\n"
        + _table(
            [
                "form",
                "header",
                "seam",
                "KL mean (nats)",
                "KL median",
                "KL max",
                "top-1 equal",
                "cosine min",
            ],
            rows,
        )
        + "\nMechanical gaps to `mask_reference`, relative to the logit scale (allowed: 1e-5 in "
        "float32):\n\n" + _table(["request", *names], gaps)
    )


def _recovery(result: dict[str, Any]) -> str:
    rows = [
        [
            f"`{name}`",
            f"{r['recovery']:.2f}",
            f"[{r['interval'][0]:.2f}, {r['interval'][1]:.2f}]",
            f"{r['right']} / {result['num_items']}",
            f"{r['mean_margin']:.2f}",
        ]
        for name, r in result["strategies"].items()
    ]
    text = (
        f"## Decision recovery, suite {result['suite']} ({result['num_items']} items)\n\n"
        f"{_machine(result)}\nMargins of the new over the old answer after an edit; recovery "
        "0 acts like stale, 1 like a clean prefill; 95 % bootstrap interval over items. `notes`: "
        "the field's K/V stay old, everything behind it is of the new value.\n\n"
        + _table(["strategy", "recovery", "interval", "right", "mean margin (nats)"], rows)
    )
    if "verify" in result:
        v = result["verify"]
        text += (
            '\n`verify="cheap"` against `"full"` (stale result, erratum, refresh+erratum): '
            f"{v['num_checks']} checks, {v['wrong_by_full']} wrong by `full`, "
            f"{v['missed_by_cheap']} of them missed by `cheap`, {v['false_alarms_of_cheap']} "
            f"false alarms; at most {v['largest_share_computed']:.0%} of the prompt computed.\n"
        )
    return text


def _store(result: dict[str, Any]) -> str:
    loads = [
        [
            name.removeprefix("load, "),
            f"{r['nbytes'] / 1e6:.0f}",
            _ms(r["read"]),
            _ms(r["read_into"]),
            _ms(r["load"]),
            f"**{r['load_over_read']:.2f}**",
            _ms(r["from_memory"]),
            _ms(r["added"]),
            f"**{r['first_token_over_read']:.2f}**",
        ]
        for name, r in result.items()
        if name.startswith("load, ")
    ]
    saves = [
        [
            name.removeprefix("save, "),
            f"{r['nbytes'] / 1e6:.0f}",
            _ms(r["raw"]),
            _ms(r["save"]),
            f"**{r['share_of_raw_speed']:.2f}**",
        ]
        for name, r in result.items()
        if name.startswith("save, ")
    ]
    looks, lists, small = result["lookup"], result["listing"], result["int8"]
    together = [
        [
            name,
            f"2 x {result['processes']['operations_each']}",
            str(r["compiled"]),
            str(r["must_be_there"]),
            str(r["must_be_gone"]),
            str(len(r["faults"])),
        ]
        for name, r in result["processes"].items()
        if isinstance(r, dict)
    ]
    return (
        f"## The store\n\n{_machine(result)}\n"
        "A compiled segment of 6144 tokens. `read` is `open().read()`, `read into` reads into "
        "memory in use before; `load` opens, checks every digest and maps. `cold`: the file is "
        "dropped from the page cache before each run. The last column is what a first token "
        "costs more from the file than from memory, over `read`; at most 1.3 is wanted.\n\n"
        + _table(
            [
                "dtype, cache",
                "MB",
                "read ms",
                "read into ms",
                "load ms",
                "load / read",
                "first token from memory ms",
                "from the file, added ms",
                "added / read",
            ],
            loads,
        )
        + "\nSaving, against writing the same bytes and fsync; at least 0.7 of that speed is "
        "wanted:\n\n"
        + _table(["dtype", "MB", "write and fsync ms", "save ms", "share of its speed"], saves)
        + f"\nLooking up in memory: {_ms(looks['in_memory_us'], 1)} us, a shared segment of "
        f"another tenant {_ms(looks['shared_in_memory_us'], 1)} us, one that is not there "
        f"{_ms(looks['absent_us'], 1)} us (at most 50 wanted). Listing "
        f"{lists['num_segments']:,} segments: {_ms(lists['list'])} ms; in a new process, with "
        f"its start and imports, {_ms(lists['KVStore, process'])} ms (less than 1000 wanted); "
        f"with a lost index {lists['list, index lost']['median'] / 1e3:.1f} s, once.\n"
        f"\nint8 on `examples/policy.md`, {small['tokens']} tokens, {result['machine']['dtype']}: "
        f"{small['size_over_exact']:.2f} of the size, error {small['rms_error']:.4f} (root mean "
        f"square) and {small['max_error']:.4f} (largest) of its tensors. Next token after a "
        f"splice of it against one of the exact segment, {small['num_requests']} requests: KL "
        f"mean {small['kl_mean']:.6f}, median {small['kl_median']:.6f}, largest "
        f"{small['kl_max']:.5f} nats, top-1 equal {small['top1_equal']} / "
        f"{small['num_requests']}; the splice itself against an exact prefix hit: mean "
        f"{small['splice_kl_mean']:.6f} nats, {small['splice_top1_equal']} / "
        f"{small['num_requests']}.\n"
        "\nTwo processes that do random operations on one folder, judged by what each noted:\n\n"
        + _table(
            ["mode", "operations", "compiled", "must be there", "must be gone", "faults"], together
        )
    )


def _tools(result: dict[str, Any]) -> str:
    orders, back = result["orders"], result["retracted"]
    rows = [
        [name, str(number), str(back["still_chosen"][f"{name}, full prefill"])]
        for name, number in back["still_chosen"].items()
        if not name.endswith("full prefill")
    ]
    return (
        f"## Tools as segments, {result['machine']['dtype']}, {result['num_seam_tokens']} seam "
        f"token(s)\n\n{_machine(result)}\n"
        f"Four tools in all 24 orders, {orders['num_decisions']} decisions between their names, "
        f"against a full prefill of the same tokens. At least {orders['least_share_kept']:.1%} of "
        "the tools' tokens are kept when they are reordered.\n\n"
        + _table(
            ["same decision", "top-1 equal", "KL median", "KL max", "floor", "right", "full right"],
            [
                [
                    f"{orders['decides_as_full']:.2f}",
                    f"{orders['top1_agree']:.2f}",
                    f"{orders['kl_nats_median']:.4f}",
                    f"{orders['kl_nats_max']:.4f}",
                    f"{orders['floor_kl_nats_max']:.1e}",
                    f"{orders['right']:.2f}",
                    f"{orders['full_right']:.2f}",
                ]
            ],
        )
        + f"\nA tool is retracted and what it was for is asked, {back['num_questions']} questions: "
        "how often it is chosen all the same, here and by a full prefill of the same tokens.\n\n"
        + _table(["retracted by", "still chosen", "still chosen by a full prefill"], rows)
    )


def _images(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{r['patches']} ({r['tokens']} tokens)",
            _ms(r["full"]),
            _ms(r["image computed, tower too"]),
            _ms(r["image computed"]),
            _ms(r["image spliced"]),
            f"**{r['saved']:.1f}x**",
            f"{r['gap']:.1e}",
        ]
        for r in result["rows"]
    ]
    return (
        f"## Images, {result['machine']['dtype']}\n\n{_machine(result)}\n"
        f"A conversation of {result['before']} cached tokens, an image, {result['new']} new "
        "tokens; the image was compiled for another conversation. `gap`: to a masked forward, of "
        "the logit scale.\n\n"
        + _table(
            [
                "patches",
                "everything computed ms",
                "image and vision tower ms",
                "image, tower remembered ms",
                "spliced ms",
                "saved",
                "gap",
            ],
            rows,
        )
    )


def _predict(result: dict[str, Any]) -> str:
    rows = [
        [
            str(r["turn"]),
            f"`{r['plan']}`",
            str(r["computed"]),
            str(r["moved"]),
            _ms(r["predicted_ms"]),
            _ms(r["measured_ms"]),
            f"**{r['ratio']['median']:.2f}** [{r['ratio']['min']:.2f}-{r['ratio']['max']:.2f}]",
            f"{r['full_ratio']['median']:.2f}",
        ]
        for r in result["rows"]
    ]
    return (
        f"## Predicted times, {result['scenario']}, {result['machine']['dtype']}\n\n"
        f"{_machine(result)}\nWhat `kvnotes explain` says before anything runs, against the time "
        "to the first token.\n\n"
        + _table(
            [
                "turn",
                "plan",
                "computed",
                "moved",
                "predicted ms",
                "measured ms",
                "predicted / measured",
                "the same of a full prefill",
            ],
            rows,
        )
    )


def _lint(result: dict[str, Any]) -> str:
    rows = [
        [
            half,
            f"{found['items']} ({found['decoys']})",
            name.replace("_", " "),
            f"{rate['hits']} / {rate['cases']}",
            f"**{rate['value']:.3f}** [{rate['interval'][0]:.3f}, {rate['interval'][1]:.3f}]",
        ]
        for half, found in result.items()
        for name, rate in found["rates"].items()
    ]
    return (
        "## Lint\n\n`python bench/lint.py`\n\nLabelled lines of prompts and logs; a decoy looks "
        "volatile and is not. The rules were fitted to `dev`; `heldout` was labelled before they "
        "saw it. 95 % Wilson intervals; at least 0.95 is wanted.\n\n"
        + _table(["half", "lines (decoys)", "rate", "hits", "value"], rows)
    )


if __name__ == "__main__":
    main()
