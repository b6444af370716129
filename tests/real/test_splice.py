"""The mechanical targets on SmolLM2 with the real retail policy."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvnotes
from kvnotes import SamplingParams
from kvnotes.fidelity import MECHANICAL_TOLERANCE, compare, mask_reference
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep

TOLERANCE = MECHANICAL_TOLERANCE["float32"]
HEADER = "<|im_start|>system\nYou serve an online shop. The policy follows.\n"
ASK = (
    "<|im_end|>\n<|im_start|>user\nCan I still cancel my order?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> kvnotes.Model:
    return kvnotes.load(str(smollm2_path))


def test_splice_edit_and_delete_of_the_policy_equal_the_mask(
    model: kvnotes.Model, shared_data: Path
) -> None:
    engine, encode = model.engine, model.tokenizer.encode
    header, ask = encode(HEADER), encode(ASK)
    policy = encode((shared_data / "tau2_retail_policy.md").read_text())
    ids = (*header, *policy, *ask)
    start, size = len(header), len(policy)
    segment = engine.compile(policy)
    plan = plan_compose(ids, [Splice("policy", segment.run, 0, size, start)], num_seam_tokens=1)
    spliced = engine.execute(plan, segments=[segment])
    reference = mask_reference(engine, spliced.cache.layout)
    assert compare(spliced.last_logits(), reference).max_logit_gap <= TOLERANCE
    # a deletion, a longer value and scattered notes in one plan
    a, b = start + 300, start + 900
    wanted = (*ids[:a], *ids[a + 25 : b], *ids[:7], *ids[b + 3 :])
    matches = [Match(0, 0, a), Match(a + 25, a, b - a - 25), Match(b + 3, b - 18, len(ids) - b - 3)]
    edit = plan_keep(
        spliced.cache.layout,
        matches,
        Plan.prefill(wanted),
        strategy="selective",
        recompute=range(start + 50, start + 1400, 173),
    )
    edited = engine.execute(edit, base=spliced.cache)
    reference = mask_reference(engine, edited.cache.layout)
    assert compare(edited.last_logits(), reference).max_logit_gap <= TOLERANCE


def test_a_session_on_the_real_model_decides_as_a_clean_prefill(model: kvnotes.Model) -> None:
    session = kvnotes.Session(
        model,
        messages=[
            {"role": "system", "content": "You work at an information desk.\n"},
            {"role": "system", "content": "The visitor comes from {{country}}.\n"},
        ],
        fields={"country": "France"},
    )
    ask = "What is the capital of the visitor's country?"
    choices = ["The capital is Paris.", "The capital is Tokyo."]
    assert session.user(ask, decide=choices).decision.chosen == choices[0]  # type: ignore[union-attr]
    session.edit(country="Japan", strategy="refresh+erratum", verify="full")
    turn = session.user(ask, decide=choices, compare=True)
    assert turn.decision is not None and turn.comparison is not None
    assert turn.decision.chosen == turn.decision.clean_chosen == choices[1]
    assert turn.decision.stale_chosen == choices[0]
    assert turn.verification is not None and turn.verification.agreed


def test_generated_text_streams_as_it_is_generated(model: kvnotes.Model) -> None:
    def session() -> kvnotes.Session:
        made = kvnotes.Session(model, messages=[{"role": "system", "content": "Be brief.\n"}])
        made.add("user", "Name a color.")
        return made

    params = SamplingParams(max_new_tokens=12)
    assert "".join(session().stream(params)) == session().generate(params).text
