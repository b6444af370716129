"""Sessions over a server are those of the embedded engine that computes the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_served import BLOCK, FakeVLLM, LogProbs, fake, tokenizer_folder
from helpers_session import shop, tiny_model

from kvnotes import SamplingParams, Session
from kvnotes.session import Model, Turn

TOLERANCE = 1e-4
"""Of a summed log-probability: caches that are put together otherwise round otherwise."""


def computed(model: Model) -> LogProbs:
    """Log-probabilities of every next token, each prompt computed from nothing."""

    def log_probs(ids: tuple[int, ...]) -> np.ndarray:
        logits = model.engine.prefill(ids).last_logits()
        return np.asarray(torch.log_softmax(logits.double(), -1).numpy())

    return log_probs


@pytest.fixture(scope="module", params=["smollm2", "qwen25", "gemma"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Model, FakeVLLM]:
    """The embedded model, and one over a server that computes with it."""
    return both(request.param, tmp_path_factory.mktemp(request.param))


def both(family: str, folder: Path) -> tuple[Model, Model, FakeVLLM]:
    embedded = tiny_model(family)
    server = fake(family, log_probs=computed(embedded))
    return embedded, server.connect(tokenizer_folder(folder, family)), server


def converse(model: Model, strategy: str) -> tuple[Session, list[Turn]]:
    session = shop(model, strategy=strategy, erratum_mode="append", splice="never")
    turns = [session.user("Is the price low?", decide=["yes", "no", "yes, it is"])]
    turns.append(session.generate(SamplingParams(max_new_tokens=6)))
    session.edit(status="high")
    turns.append(session.user("And now?", generate=SamplingParams(max_new_tokens=6)))
    session.edit(status="low", tier="silver")
    fork = session.fork()
    turns.append(session.user("Why?", decide=["yes", "no"]))
    turns.append(fork.user("Well?", generate=SamplingParams(max_new_tokens=6)))
    return session, turns


def said(turn: Turn) -> dict[str, Any]:
    return {
        "ids": turn.token_ids,
        "text": turn.text,
        "strategy": turn.strategy,
        "shape": turn.plan.shape,
        "tokens": turn.plan.tokens,
        "prompt": turn.plan.token_ids,
        "chosen": turn.decision and turn.decision.chosen,
        "fallback": turn.fallback_reason,
    }


@pytest.mark.parametrize("strategy", ["erratum", "suffix"])
def test_every_turn_is_the_one_of_the_embedded_engine(
    strategy: str, pair: tuple[Model, Model, FakeVLLM]
) -> None:
    embedded, served, _ = pair
    (ours, mine), (reference, theirs) = converse(served, strategy), converse(embedded, strategy)
    for ours_turn, turn in zip(mine, theirs, strict=True):
        assert said(ours_turn) == said(turn)
        if turn.decision is not None and ours_turn.decision is not None:
            for choice, score in turn.decision.choices.items():
                assert abs(ours_turn.decision.choices[choice] - score) < TOLERANCE
    assert ours.render().token_ids == reference.render().token_ids
    assert ours.exact == reference.exact


def test_what_a_plan_says_is_reused_is_what_the_server_had(
    pair: tuple[Model, Model, FakeVLLM],
) -> None:
    _, served, server = pair
    server.cached.clear()
    session, turns = converse(served, "erratum")
    for turn in turns:
        assert turn.served is not None and turn.served.num_cached_tokens is not None
        # whole blocks, and of the last turn's prompt also what the history has not kept
        assert turn.served.num_cached_tokens > turn.plan.tokens.reused - BLOCK
    assert session.exact


@pytest.mark.parametrize("family", ["mistral", "llama3"])
def test_what_a_template_moves_is_computed_and_that_is_said(family: str, tmp_path: Path) -> None:
    """One puts system text before the last question, the other trims what was generated."""
    embedded, served, _ = both(family, tmp_path)
    pairs = list(zip(converse(embedded, "erratum")[1], converse(served, "erratum")[1], strict=True))
    assert any("R'" in moved.plan.shape for moved, _ in pairs)
    for moved, turn in pairs:
        assert turn.plan.exact and "R'" not in turn.plan.shape
        said = "behind_a_change:not_on_a_server:computed" in turn.notices
        assert said == ("R'" in moved.plan.shape)
