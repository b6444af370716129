"""Tools of a running session on SmolLM2: moved, not computed, and equal to the masked forward."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from helpers_session import gap_to_mask, lineage

import kvnotes
from kvnotes.fidelity import MECHANICAL_TOLERANCE
from kvnotes.plan import Plan, Reuse

TOLERANCE = MECHANICAL_TOLERANCE["float32"]
ASK = "Please tell me where order #W2378156 is."
MIN_KEPT = 0.8
ROOT = Path(__file__).resolve().parents[2]


TOOLS: list[dict[str, Any]] = json.loads((ROOT / "examples" / "tools.json").read_text())
NAMES = tuple(tool["function"]["name"] for tool in TOOLS)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> kvnotes.Model:
    return kvnotes.load(str(smollm2_path))


def _session(model: kvnotes.Model, num_tools: int) -> kvnotes.Session:
    session = kvnotes.Session(
        model,
        messages=[
            {"role": "system", "content": "You serve an online shop. Call one of these tools.\n"},
            {"role": "user", "content": ASK, "id": "ask"},
        ],
    )
    for tool in TOOLS[:num_tools]:
        session.add_tool(tool, before="ask")
    return session


def _kept_share(session: kvnotes.Session, plan: Plan) -> float:
    """Share of the tools' tokens that a plan reuses or moves."""
    ranges = [(s.start, s.stop) for s in session.render().segments]
    kept = [(s.target_start, s.target_stop) for s in plan.steps if isinstance(s, Reuse)]
    inside = sum(max(0, min(b, d) - max(a, c)) for a, b in ranges for c, d in kept)
    return inside / sum(stop - start for start, stop in ranges)


def test_four_tools_in_all_orders_are_moved_and_equal_the_mask(model: kvnotes.Model) -> None:
    session = _session(model, 4)
    session.decide(NAMES)
    for names in permutations(NAMES):
        session.reorder_tools(names)
        turn = session.decide(NAMES)
        assert tuple(session.tools) == names
        assert _kept_share(session, turn.plan) >= MIN_KEPT
        assert gap_to_mask(session) <= TOLERANCE
    assert len(model.book) == 4, "compiled once, whatever the order"


def test_a_tool_added_and_retracted_leaves_the_cache_as_if_it_had_never_been_there(
    model: kvnotes.Model,
) -> None:
    session, never = _session(model, 3), _session(model, 3)
    session.decide(NAMES[:3])
    never.decide(NAMES[:3])
    for before in ("ask", None, f"tool/{NAMES[0]}"):
        session.add_tool(TOOLS[3], before=before)
        turn = session.decide(NAMES)
        assert _kept_share(session, turn.plan) >= MIN_KEPT
        assert gap_to_mask(session) <= TOLERANCE
        session.retract_tool(NAMES[3])
        session.decide(NAMES[:3])
        assert session.render().token_ids == never.render().token_ids
        assert lineage(session) == lineage(never)


def test_a_sub_agent_costs_the_parent_its_result_alone(model: kvnotes.Model) -> None:
    session = _session(model, 4)
    before = session.decide(NAMES).plan.tokens.total
    live = session._talk.live
    assert live is not None
    checksum, buffer = live.cache.checksum(), live.cache.buffer

    def look(agent: kvnotes.Session) -> str:
        text = agent.generate(kvnotes.SamplingParams(max_new_tokens=12)).text
        assert live.cache.checksum() == checksum
        return str(text)

    result = session.delegate("Answer in one line.", look, role="user")
    turn = session.decide(NAMES)
    assert result.plan.shape == turn.plan.shape == "R C"
    assert turn.plan.tokens.computed <= turn.plan.tokens.total - before + 4
    assert session._talk.live is not None and session._talk.live.cache.buffer is buffer
    assert gap_to_mask(session) <= TOLERANCE
