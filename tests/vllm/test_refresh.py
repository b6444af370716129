"""A field that changed in place: what stood behind it is copied, under another name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers_vllm import BLOCK_SIZE, LOGPROB_TOLERANCE, Served, ask, scheduler, tokens

from kvnotes.plan import Compute, Plan
from kvnotes.plan.lineage import clip
from kvnotes.segment import KVCache

START, WIDTH = 45, 4
FIRST = 64
"""The block behind the field."""
CLEARLY = 100.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm(extra={"allow_refresh": True})


@pytest.fixture(autouse=True)
def fresh(llm: Any) -> Any:
    llm.reset_prefix_cache()
    yield
    pool = scheduler(llm).kv_cache_manager.block_pool
    ask(llm, [tokens(9, 40)])  # blocks that were copied are let go in the next step
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def edited(ids: Sequence[int], value: int, *more: int) -> tuple[int, ...]:
    return (*ids[:START], *tokens(value, WIDTH), *ids[START + WIDTH :], *more)


def wish(old: Sequence[int]) -> dict[str, Any]:
    return {"refresh": {"start": START, "token_ids": list(old[START : START + WIDTH])}}


def expected(served: Served, base: KVCache, ids: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
    """The embedded engine: the field's blocks computed, those behind it as they were."""
    stop = base.length // BLOCK_SIZE * BLOCK_SIZE
    steps = (
        Compute(0, tuple(ids[:FIRST])),
        *clip(base.layout, FIRST, stop),
        Compute(stop, tuple(ids[stop:])),
    )
    found = served.engine.execute(Plan(tuple(ids), steps), base=base)
    return torch.log_softmax(found.last_logits(), -1), found.cache


def test_what_stood_behind_the_field_is_used_again(served: Served, llm: Any) -> None:
    old = tokens(1, 300)
    ask(llm, [old])
    new = edited(old, 77, *tokens(3, 40))
    (reply,) = ask(llm, [new], [wish(old)], 3)
    logprobs, _ = expected(served, served.engine.prefill(old).cache, new)
    assert reply.gap(logprobs) <= LOGPROB_TOLERANCE
    assert reply.gap(served.full(new)) > CLEARLY * LOGPROB_TOLERANCE
    assert reply.said["strategy"] == "refresh" and not reply.said["exact"]
    assert reply.cached >= 300 // BLOCK_SIZE * BLOCK_SIZE - FIRST


def test_a_second_change_starts_from_the_first(served: Served, llm: Any) -> None:
    old = tokens(1, 300)
    ask(llm, [old])
    one = edited(old, 77, *tokens(3, 70))
    ask(llm, [one], [wish(old)])
    two = edited(one, 78, *tokens(4, 30))
    (reply,) = ask(llm, [two], [wish(one)])
    _, base = expected(served, served.engine.prefill(old).cache, one)
    logprobs, _ = expected(served, base, two)
    assert reply.gap(logprobs) <= LOGPROB_TOLERANCE
    assert reply.said["loaded_tokens"] == len(one) // BLOCK_SIZE * BLOCK_SIZE - FIRST


def test_the_same_change_again_is_found(served: Served, llm: Any) -> None:
    old = tokens(1, 300)
    ask(llm, [old])
    new = edited(old, 77, *tokens(3, 40))
    ask(llm, [new], [wish(old)])
    (again,) = ask(llm, [new], [wish(old)])
    assert again.cached == (len(new) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.said["loaded_tokens"] == 0


def test_plain_requests_stay_plain(served: Served, llm: Any) -> None:
    old = tokens(1, 300)
    ask(llm, [old])
    new = edited(old, 77, *tokens(3, 40))
    ask(llm, [new], [wish(old)])
    plain, before = ask(llm, [new])[0], ask(llm, [old])[0]
    assert plain.gap(served.full(new)) <= LOGPROB_TOLERANCE
    assert plain.cached == FIRST  # what the change computed is exact
    assert before.gap(served.full(old)) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"start": 20, "token_ids": [7] * 10}, "refresh_not_cached"),
        ({"start": 299, "token_ids": [7] * 10}, "refresh_outside_prompt"),
    ],
)
def test_what_cannot_be_used_is_computed(
    served: Served, llm: Any, said: dict[str, Any], reason: str
) -> None:
    ids = tokens(1, 300)
    (reply,) = ask(llm, [ids], [{"refresh": said}])
    assert reply.said["fallback_reason"] == reason
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_blocks_that_are_evicted_meanwhile_are_computed(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers_vllm import connector

    old = tokens(1, 300)
    ask(llm, [old])
    side = connector(llm)
    block, asked = side._block, []

    def gone(name: bytes) -> Any:
        asked.append(name)
        return block(name) if len(asked) <= 7 else None

    monkeypatch.setattr(side, "_block", gone)
    new = edited(old, 77, *tokens(3, 40))
    (reply,) = ask(llm, [new], [wish(old)])
    assert reply.said["fallback_reason"] == "refresh_evicted"
    assert reply.gap(served.full(new)) <= LOGPROB_TOLERANCE
    monkeypatch.undo()
    (plain,) = ask(llm, [new])
    assert plain.gap(served.full(new)) <= LOGPROB_TOLERANCE
