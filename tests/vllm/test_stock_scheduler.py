"""vLLM's own scheduler: one load, from a block on, behind a header that is cached."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_vllm import BLOCK_SIZE, LOGPROB_TOLERANCE, Served, ask, tokens

HEADER, QUESTION = tokens(1, 41), tokens(2, 19)
POLICY, TOOLS = tokens(3, 300), tokens(4, 150)
START = 64
"""Where the load begins: the first block behind the header and a seam token."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"))
    made.compile("policy", POLICY)
    made.compile("tools", TOOLS)
    return made


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm(scheduler_cls=None)


@pytest.fixture(autouse=True)
def fresh(llm: Any) -> None:
    llm.reset_prefix_cache()


def warm(llm: Any) -> None:
    """Have the header and the seam computed: what stands before the load, exactly."""
    assert START % BLOCK_SIZE == 0
    ask(llm, [(*HEADER, *POLICY)[: START + 1]], [{"splice": False}])


def test_behind_a_cached_header_a_segment_is_loaded(served: Served, llm: Any) -> None:
    warm(llm)
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids])
    seam = START - len(HEADER)
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], seam)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.said["shape"] == plan.shape and reply.said["digest"] == plan.digest(
        served.engine.fingerprint
    )
    assert reply.said["loaded_tokens"] == len(POLICY) - seam
    assert reply.cached == len(HEADER) + len(POLICY)


def test_the_first_of_two_segments_is_loaded(served: Served, llm: Any) -> None:
    warm(llm)
    ids = (*HEADER, *POLICY, *TOOLS, *QUESTION)
    (reply,) = ask(llm, [ids])
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], START - len(HEADER))
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.said["segments"] == ["policy@1"]


def test_behind_a_header_that_is_not_cached_all_is_computed(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids])
    assert reply.said["fallback_reason"] == "prefix_not_cached"
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE and reply.cached == 0
    (again,) = ask(llm, [ids], [{"splice": False}])  # its blocks have plain names
    assert again.cached >= len(ids) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    assert again.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_a_segment_at_the_start_needs_no_header(served: Served, llm: Any) -> None:
    ids = (*POLICY, *QUESTION)
    (reply,) = ask(llm, [ids])
    assert reply.said["exact"] and reply.cached == len(POLICY)
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_plain_requests_stay_plain(served: Served, llm: Any) -> None:
    warm(llm)
    ids = (*HEADER, *POLICY, *QUESTION)
    ask(llm, [ids])
    (plain,) = ask(llm, [ids], [{"splice": False}])
    assert plain.gap(served.full(ids)) <= LOGPROB_TOLERANCE and plain.cached == START


def test_a_load_that_fails_is_computed_and_leaves_no_trace(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def broken(injection: Any) -> None:
        raise MemoryError("no room to move keys")

    warm(llm)
    ids = (*HEADER, *POLICY, *QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(get_kv_transfer_group()._working, "_put", broken)
        (reply,) = ask(llm, [ids], num_tokens=3)
    assert reply.said["fallback_reason"] == "load_failed"
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE
    (after,) = ask(llm, [ids])
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], START - len(HEADER))
    assert after.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
