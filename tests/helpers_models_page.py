"""What the gate says about every model type, and the page that says so.

    python tests/helpers_models_page.py docs/models.md

measures them all and writes the page; it takes a minute or two.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from helpers_matrix import CHUNK, WINDOW, causal_types, tiny_model
from helpers_models import engine_of

from kvnotes.errors import UnsupportedModelError
from kvnotes.gate import GAP_FLOOR, run_gate
from kvnotes.spec import LayerSpec, ModelSpec

EXACT, REFUSED, WRONG, NOT_SMALL = "exact", "refused", "wrong", "not built"


@dataclass(frozen=True)
class Result:
    """What the gate says about one model type.

    Args:
        verdict: `exact`, `refused`, `wrong`, or `not built`.
        layout: What is cached, and what a move does.
        error: Largest gap to a masked forward, of the logit scale.
        control: The same without rotation; None where nothing is rotated.
        cause: Why it was refused or not built.
        copies: Why compiled K/V are copied; "" if they are read where they stand.
    """

    verdict: str
    layout: str = ""
    error: float | None = None
    control: float | None = None
    cause: str = ""
    copies: str = ""


def measure(model_type: str) -> Result:
    """Build a tiny model and run the gate on it."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # of any kind: configurations check themselves
        return Result(NOT_SMALL, cause=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    try:
        engine = engine_of(model)
        found = run_gate(engine)
    except UnsupportedModelError as error:
        return Result(REFUSED, cause=error.message.split("is not supported: ")[-1])
    verdict = EXACT if found.passed else WRONG
    error_ = max(found.worst, GAP_FLOOR)
    return Result(
        verdict,
        layout_of(engine.spec),
        error_,
        found.control,
        engine.spec.limit_reason,
        engine.copies_because,
    )


def layout_of(spec: ModelSpec) -> str:
    """Say what the layers cache, and how that moves, in a line."""
    counts = Counter(_layer(layer, spec) for layer in spec.layers)
    return "; ".join(f"{number} x {text}" for text, number in counts.items())


def _layer(layer: LayerSpec, spec: ModelSpec) -> str:
    kind = f"{layer.kind} {layer.window}" if layer.window else layer.kind
    if not layer.moves:
        return f"{kind}: no positions"
    moves = []
    for name, index in layer.moves:
        rope = spec.ropes[index]
        width = layer.shape(name, 1)[2]
        part = f"{rope.start}:{rope.start + rope.rotary_dim} of {width}"
        back = ", backwards" if rope.reversed else ""
        moves.append(f"{name} {rope.pairing} {part}{back}")
    return f"{kind}: {', '.join(moves)}"


# -- the page --------------------------------------------------------------------------------

HEAD = """# Models

What `kvnotes` does with each causal language model of transformers {version}, found by its gate on
a tiny random model of that type (4 layers, float32, window {window}, chunk {chunk}), written by
`python tests/helpers_models_page.py docs/models.md`. No model is known by its name: whatever you
load goes through the same gate, and `kvnotes doctor MODEL` shows what it finds on the weights.

* *exact*: splices, deletions, edits of another length and recomputed notes equal a masked forward
  that shares no cache and no rotation with them. `error` is the largest gap of the logits,
  relative to the largest logit; `unrotated` is the gap of a splice whose positions stay as they
  were, to show that the comparison can fail.
* *read in place*: compiled K/V are read where they stand; *copied*: they are copied and turned,
  because the model's attention takes no others (see
  [how it works](how-it-works.md#reading-keys-where-they-stand)).
* *refused*: with the cause, when the model is loaded. An erratum can still be sent to it as text:
  `kvnotes.ErratumStyle().text("status", "shipped")`.
* *not built*: transformers' configuration could not be made small here; the gate decides when one
  is loaded.

A layer is `full` (it sees all tokens), `sliding N` (the last N), `chunked N` (those of its own
chunk of N; a move is exact by multiples of N, and inside of the first chunk), `latent` (one vector
for all heads, and a rotated part beside it). `half` and `interleaved` say which dimensions are
rotated together.

Weights may be quantized, `kvnotes.load(NAME, quantize="int8")` (`int4`, `float8`; needs
`pip install "kvnotes[quantize]"`), and an adapter's folder loads the model that it stands on
(`pip install "kvnotes[adapters]"`): each is another model to the gate and to every stored segment.
K/V stay in the model's dtype: a quantized cache that a model's own settings ask for is not used.

Images: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and PaddleOCR-VL are proved by
`tests/model/test_images.py` on tiny random models (transformers 5.24); see
[how it works](how-it-works.md#other-layouts).

{counts}

| type | verdict | what is cached, and what moves | compiled | error | unrotated | cause, or limit |
|---|---|---|---|---|---|---|
"""


def write_page(path: Path, results: dict[str, Result]) -> None:
    """Write docs/models.md."""
    counts = Counter(result.verdict for result in results.values())
    text = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    num_read = sum(r.verdict == EXACT and not r.copies for r in results.values())
    rows = "".join(
        f"| {name} | {r.verdict} | {r.layout} | {_read(r)} | {_number(r.error)} | "
        f"{_number(r.control)} | "
        f"{_cell(r.cause)} |\n"
        for name, r in results.items()
    )
    head = HEAD.format(
        version=transformers.__version__,
        window=WINDOW,
        chunk=CHUNK,
        counts=f"Of {len(results)} types: {text}. {num_read} read compiled K/V in place.",
    )
    path.write_text(head + rows, encoding="utf-8")


def read_page(path: Path) -> dict[str, Result]:
    """Return the rows of the page, without errors and causes."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|", path.read_text(), re.MULTILINE)
    return {name: Result(verdict, layout.strip()) for name, verdict, layout in rows[1:]}


def _read(result: Result) -> str:
    if result.verdict != EXACT:
        return ""
    return "copied" if result.copies else "read in place"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "/"))[:200].strip()


def main(names: Iterable[str]) -> dict[str, Result]:
    """Measure model types, and say how each fared."""
    results = {}
    for name in names:
        results[name] = measure(name)
        print(f"{name}: {results[name].verdict} {results[name].cause}"[:150], file=sys.stderr)
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = main(causal_types())
    write_page(Path(sys.argv[1]), found)
    print(Counter(result.verdict for result in found.values()))
