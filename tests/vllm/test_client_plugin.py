"""Sessions over a real server with the plug-in: segments are spliced there, and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_server import RunningServer, running

import kvnotes
from kvnotes import KVStore, SamplingParams, SegmentText, Session
from kvnotes.errors import PlanError
from kvnotes.session import Model
from kvnotes.vllm import connect
from kvnotes.vllm.connecting import ServedModel
from kvnotes.vllm.scheduler_name import SCHEDULER
from kvnotes.vllm.served import prepare

SCORE_TOLERANCE = 1e-3
"""As in test_client.py. A segment that is computed, not spliced, differs by 1e-2."""

POLICY = SegmentText(
    "policy@3", (Path(__file__).resolve().parents[2] / "examples" / "policy.md").read_text()
)
CHOICES = ["Yes", "No", "I cannot say"]
FEW = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def embedded(store: Path) -> Model:
    return kvnotes.load("smollm2-135m", verify_model=False, store=KVStore(store))


@pytest.fixture(scope="module")
def server(
    smollm2_path: Path, store: Path, embedded: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    shop(embedded)  # compiles the policy into the store
    config = {
        "kv_connector": "KVNotesConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvnotes.vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "model": str(prepare("smollm2-135m", dtype="float32")),
            "store": str(store),
        },
    }
    options = ["--kv-transfer-config", json.dumps(config), "--scheduler-cls", SCHEDULER]
    log = tmp_path_factory.mktemp("server") / "log"
    with running(smollm2_path, log, options) as started:
        yield started


@pytest.fixture(scope="module")
def model(server: RunningServer) -> ServedModel:
    return connect(server.url, tokenizer="smollm2-135m")


def shop(model: Model, policy: SegmentText = POLICY, **options: Any) -> Session:
    return Session(
        model,
        messages=[
            {"role": "system", "content": "You serve a shop.\n"},
            {"role": "system", "segment": policy.name},
            {"role": "system", "content": "The order is {{status}}.\n"},
        ],
        fields={"status": "pending"},
        segments={policy.name: policy},
        **options,
    )


def test_the_plug_in_is_found(model: ServedModel) -> None:
    assert model.engine.facts.plugin and model.engine.abilities.splices


def test_a_spliced_turn_decides_as_the_embedded_splice(
    model: ServedModel, embedded: Model, server: RunningServer
) -> None:
    ours = shop(model).user("Can I return it?", decide=CHOICES)
    reference = shop(embedded).user("Can I return it?", decide=CHOICES)
    assert ours.plan.shape == reference.plan.shape == "C R' C"
    assert ours.served is not None and ours.fallback_reason is None
    assert ours.served.num_spliced_tokens == ours.plan.tokens.moved
    assert ours.decision is not None and reference.decision is not None
    for choice in CHOICES:
        gap = ours.decision.choices[choice] - reference.decision.choices[choice]
        assert abs(gap) < SCORE_TOLERANCE, choice
    full = shop(embedded, splice="never").user("Can I return it?", decide=CHOICES)
    assert full.decision is not None
    gaps = [full.decision.choices[c] - ours.decision.choices[c] for c in CHOICES]
    assert max(map(abs, gaps)) > 10 * SCORE_TOLERANCE  # so it was a splice


def test_later_turns_hit_what_was_spliced(model: ServedModel, embedded: Model) -> None:
    ours, reference = shop(model), shop(embedded, erratum_mode="append")
    for session in (ours, reference):
        session.user("Can I return it?", generate=FEW)
        session.edit(status="delivered", strategy="erratum")
    turn = ours.user("And now?", generate=FEW)
    assert turn.token_ids == reference.user("And now?", generate=FEW).token_ids
    assert turn.served is not None and turn.served.num_cached_tokens is not None
    assert turn.served.num_cached_tokens > 0.9 * turn.plan.tokens.total
    assert turn.served.num_spliced_tokens


def test_a_plain_prompt_is_not_spliced_behind_the_sessions_back(
    model: ServedModel, embedded: Model
) -> None:
    ours = shop(model, splice="never").user("Can I return it?", decide=CHOICES)
    full = shop(embedded, splice="never").user("Can I return it?", decide=CHOICES)
    assert ours.served is not None and ours.served.num_spliced_tokens is None
    assert ours.decision is not None and full.decision is not None
    for choice in CHOICES:
        gap = ours.decision.choices[choice] - full.decision.choices[choice]
        assert abs(gap) < SCORE_TOLERANCE, choice


def test_a_segment_that_the_server_has_not_is_computed_and_that_is_said(
    model: ServedModel,
) -> None:
    other = SegmentText("manual@1", "Turn the lamp off before you clean it. " * 20)
    turn = shop(model, other).user("Can I clean it?", decide=CHOICES)
    assert turn.fallback_reason == "the server computed what was to be spliced: no_segment"


def test_refresh_and_erratum_is_refused_by_name(model: ServedModel) -> None:
    with pytest.raises(PlanError, match=r"'refresh\+erratum' needs more than a vLLM server with"):
        shop(model).edit(status="delivered", strategy="refresh+erratum")
