"""Segments of the embedded engine in vLLM's cache, at any place of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import (
    BLOCK_SIZE,
    LOGPROB_TOLERANCE,
    Served,
    ask,
    connector,
    scheduler,
    tokens,
)

from kvnotes.vllm import scheduling
from kvnotes.vllm.salt import salt_request

HEADER, QUESTION = tokens(1, 41), tokens(2, 19)
POLICY, TOOLS = tokens(3, 300), tokens(4, 150)
CLEARLY = 100.0
"""How much further than rounding a splice is from a full prefill on these models."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"))
    made.compile("policy", POLICY)
    made.compile("tools", TOOLS)
    for value in ("gold", "silver"):
        made.compile("tier", tokens(7, 200), tokens(8 + len(value), 12), (("tier", value),))
    return made


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm()


@pytest.fixture(autouse=True)
def fresh(llm: Any) -> Iterator[None]:
    """Each test begins with an empty prefix cache."""
    llm.reset_prefix_cache()
    yield
    assert not connector(llm)._tracked  # nothing of a request that ended is kept


@pytest.mark.parametrize("seam", [0, 1, 16, 64])
def test_splice_equals_the_embedded_engine(served: Served, llm: Any, seam: int) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [{"num_seam_tokens": seam}])
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], seam)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.gap(served.full(ids)) > CLEARLY * LOGPROB_TOLERANCE
    assert reply.cached == len(POLICY) - seam == reply.said["loaded_tokens"]
    assert reply.said["digest"] == plan.digest(served.engine.fingerprint)
    assert reply.said["shape"] == plan.shape


def test_several_segments_stand_anywhere(served: Served, llm: Any) -> None:
    between = tokens(5, 33)
    ids = (*HEADER, *TOOLS, *between, *POLICY, *TOOLS, *QUESTION)
    (reply,) = ask(llm, [ids])
    first = len(HEADER)
    second = first + len(TOOLS) + len(between)
    splices = [
        served.splice("tools", first),
        served.splice("policy", second),
        served.splice("tools", second + len(POLICY)),
    ]
    plan = served.plan(ids, splices, 1)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.said["segments"] == ["tools@1", "policy@1", "tools@1"]
    assert reply.cached == 2 * len(TOOLS) + len(POLICY) - 3


def test_a_segment_at_the_start_is_exact_and_needs_no_seam(served: Served, llm: Any) -> None:
    ids = (*POLICY, *QUESTION)
    (reply,) = ask(llm, [ids])
    assert reply.said["exact"] and reply.cached == len(POLICY)
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_a_prompt_that_ends_in_a_segment_computes_its_last_token(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY)
    (reply,) = ask(llm, [ids], num_tokens=40)
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], 1)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.cached == len(POLICY) - 2


@pytest.mark.parametrize("value", ["gold", "silver"])
def test_the_value_of_a_request_chooses_the_variant(served: Served, llm: Any, value: str) -> None:
    ids = (*HEADER, *tokens(7, 200), *QUESTION)
    (reply,) = ask(llm, [ids], [{"values": {"tier": value}}])
    plan = served.plan(ids, [served.splice(f"tier{value}", len(HEADER))], 1)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.said["segments"] == [f"tier@1 tier={value}"]


def test_a_text_with_variants_is_computed_where_no_value_chooses_one(
    served: Served, llm: Any
) -> None:
    ids = (*HEADER, *tokens(7, 200), *QUESTION)
    plain, other = ask(llm, [ids, ids], [None, {"values": {"tier": "bronze"}}])
    for reply in (plain, other):
        assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE
    assert other.said["fallback_reason"] == "no_segment"


@pytest.mark.parametrize("wish", [{"splice": False}, {"segments": ["tools"]}])
def test_a_request_can_leave_segments_out(served: Served, llm: Any, wish: dict[str, Any]) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [wish])
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE and reply.cached == 0


def test_a_wish_that_is_not_known_is_computed_and_says_so(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [{"seam": 3}])
    assert reply.said == {"strategy": "reprefill", "fallback_reason": "invalid_request"}
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE


# -- other requests ------------------------------------------------------------------------------


def test_plain_requests_never_meet_spliced_blocks(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    ask(llm, [ids])
    (plain,) = ask(llm, [ids], [{"splice": False}])
    assert plain.cached == len(HEADER) // BLOCK_SIZE * BLOCK_SIZE  # the header is shared
    assert plain.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_without_the_salt_they_would(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    monkeypatch.setattr(scheduling, "salt_request", lambda *args: None)
    ask(llm, [ids])
    (plain,) = ask(llm, [ids], [{"splice": False}])
    assert plain.gap(served.full(ids)) > CLEARLY * LOGPROB_TOLERANCE
    assert salt_request is not scheduling.salt_request


def test_the_same_plan_finds_its_blocks_again(served: Served, llm: Any) -> None:
    ids, other = (*HEADER, *POLICY, *QUESTION), (*HEADER, *POLICY, *tokens(9, 50))
    ask(llm, [ids])
    again, on = ask(llm, [ids], [None])[0], ask(llm, [other], [None])[0]
    shared = (len(HEADER) + len(POLICY)) // BLOCK_SIZE * BLOCK_SIZE
    assert again.cached >= shared
    assert on.cached == len(HEADER) + len(POLICY)  # the rest of the last block is loaded
    plan = served.plan(other, [served.splice("policy", len(HEADER))], 1)
    assert on.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE


def test_another_seam_is_another_plan(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    ask(llm, [ids], [{"num_seam_tokens": 1}])
    (reply,) = ask(llm, [ids], [{"num_seam_tokens": 40}])
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], 40)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE


def test_many_at_once_stay_apart(served: Served, llm: Any) -> None:
    prompts, wishes, expected = [], [], []
    for index in range(12):
        header = tokens(100 + index, 20 + 7 * index)
        ids = (*header, *POLICY, *tokens(200 + index, 30), *TOOLS, *QUESTION)
        plain = index % 3 == 2
        splices = [
            served.splice("policy", len(header)),
            served.splice("tools", len(header) + len(POLICY) + 30),
        ]
        prompts.append(ids)
        wishes.append({"splice": False} if plain else {"num_seam_tokens": index})
        plan = served.plan(ids, splices, index)
        expected.append(served.full(ids) if plain else served.logprobs(plan))
    for reply, reference in zip(ask(llm, prompts, wishes, 4), expected, strict=True):
        assert reply.gap(reference) <= LOGPROB_TOLERANCE


# -- compiled by vLLM ----------------------------------------------------------------------------


def test_a_segment_that_vllm_compiles_is_that_of_the_embedded_engine(
    served: Served, llm: Any
) -> None:
    ids, preamble = tokens(11, 333), tokens(12, 21)
    wish = {"compile": {"name": "made", "version": 2, "preamble_tokens": len(preamble)}}
    (reply,) = ask(llm, [(*preamble, *ids)], [wish])
    segment = served.store.get(reply.said["segment"])
    expected = served.engine.compile(ids, preamble)
    assert segment is not None and segment.run == expected.run
    for name in ("keys", "values"):
        for mine, theirs in zip(segment.tensors[name], expected.tensors[name], strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5 * float(theirs.abs().max()))
    text = (*HEADER, *ids, *QUESTION)
    (spliced,) = ask(llm, [text])
    assert spliced.said["segments"] == ["made@2"]
    served.segments["made"] = expected
    plan = served.plan(text, [served.splice("made", len(HEADER))], 1)
    assert spliced.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE


# -- failure -------------------------------------------------------------------------------------


def test_a_damaged_file_is_computed_and_counted(served: Served, llm: Any) -> None:
    ids = tokens(21, 200)
    segment = served.engine.compile(ids)
    entry = served.store.put(segment)
    assert entry is not None
    path = served.store.path(entry.key)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.chmod(0o600)
    path.write_bytes(bytes(content))
    connector(llm)._index.refresh(now=True)
    prompt = (*HEADER, *ids, *QUESTION)
    (reply,) = ask(llm, [prompt])
    assert reply.said["fallback_reason"] == "segment_unavailable"
    assert reply.gap(served.full(prompt)) <= LOGPROB_TOLERANCE


def test_a_file_that_vanishes_is_computed(served: Served, llm: Any) -> None:
    ids = tokens(22, 200)
    entry = served.store.put(served.engine.compile(ids))
    assert entry is not None
    connector(llm)._index.refresh(now=True)
    path = served.store.path(entry.key)
    assert path is not None
    path.unlink()
    prompt = (*HEADER, *ids, *QUESTION)
    (reply,) = ask(llm, [prompt])
    assert reply.said["fallback_reason"] == "segment_unavailable"
    assert reply.gap(served.full(prompt)) <= LOGPROB_TOLERANCE


def test_a_load_that_fails_is_computed(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    working = get_kv_transfer_group()._working
    put = working._put

    def broken(injection: Any) -> None:
        put(injection)
        raise MemoryError("no room to move keys")

    monkeypatch.setattr(working, "_put", broken)
    ids = (*HEADER, *TOOLS, *tokens(5, 33), *POLICY, *QUESTION)
    replies = ask(llm, [ids, (*tokens(31, 90),)], [None, None], 3)
    assert replies[0].said["fallback_reason"] == "load_failed"
    assert replies[0].gap(served.full(ids)) <= LOGPROB_TOLERANCE
    assert replies[1].gap(served.full(tokens(31, 90))) <= LOGPROB_TOLERANCE
    monkeypatch.undo()
    (after,) = ask(llm, [ids])
    first = len(HEADER)
    second = first + len(TOOLS) + 33
    splices = [served.splice("tools", first), served.splice("policy", second)]
    assert after.gap(served.logprobs(served.plan(ids, splices, 1))) <= LOGPROB_TOLERANCE


def test_waiting_for_a_segment_has_an_end(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = connector(llm)
    ids = tokens(23, 200)
    served.store.put(served.engine.compile(ids))
    side._index.refresh(now=True)
    monkeypatch.setattr(side._open, "_to_open", _Nowhere())
    monkeypatch.setattr(side, "_config", side._config.model_copy(update={"deadline_seconds": 0.2}))
    prompt = (*HEADER, *ids, *QUESTION)
    (reply,) = ask(llm, [prompt])
    assert reply.said["fallback_reason"] == "deadline"
    assert reply.gap(served.full(prompt)) <= LOGPROB_TOLERANCE


class _Nowhere(dict[str, None]):
    """Keeps nothing: workers are never told."""

    def __setitem__(self, key: str, value: None) -> None:
        pass


def test_an_aborted_request_leaves_nothing(served: Served, llm: Any) -> None:
    from helpers_vllm import params

    engine = llm.llm_engine
    ids = (*HEADER, *POLICY, *QUESTION)
    engine.add_request("gone", {"prompt_token_ids": list(ids)}, params(None, 50))
    for _ in range(2):
        engine.step()
    engine.abort_request(["gone"])
    while engine.has_unfinished_requests():
        engine.step()
    assert not scheduler(llm).running and not connector(llm)._tracked
    free = scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()
    total = scheduler(llm).kv_cache_manager.block_pool.num_gpu_blocks
    assert free == total - 1  # block 0 is none


def test_model_file_is_one_of_this_model(served: Served, tmp_path: Path) -> None:
    from kvnotes.vllm.served import read

    made = read(served.model_file)
    assert made.identity.fingerprint == served.engine.fingerprint


def test_segments_side_by_side_behind_a_cached_header_are_loaded_at_once(
    served: Served, llm: Any
) -> None:
    header = tokens(41, 2 * BLOCK_SIZE)
    ask(llm, [(*header, 7)])
    ids = (*header, *TOOLS, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [{"num_seam_tokens": 0}])
    first = len(header)
    splices = [served.splice("tools", first), served.splice("policy", first + len(TOOLS))]
    assert reply.gap(served.logprobs(served.plan(ids, splices, 0))) <= LOGPROB_TOLERANCE
    assert reply.cached == first + len(TOOLS) + len(POLICY)
