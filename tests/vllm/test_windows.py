"""A model with windows: two groups of blocks, each layer type with its own rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_vllm import LOGPROB_TOLERANCE, Served, ask, connector, tokens

HEADER, QUESTION = tokens(1, 41), tokens(2, 19)
POLICY, TOOLS = tokens(3, 300), tokens(4, 150)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"), "windows")
    made.compile("policy", POLICY)
    made.compile("tools", TOOLS)
    return made


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm()


@pytest.fixture(autouse=True)
def fresh(llm: Any) -> None:
    llm.reset_prefix_cache()


def test_the_model_has_two_kinds_of_layers(served: Served, llm: Any) -> None:
    assert {layer.kind for layer in served.engine.spec.layers} == {"full", "sliding"}
    assert len(connector(llm)._manager.kv_cache_config.kv_cache_groups) > 1


@pytest.mark.parametrize("seam", [0, 16])
def test_splices_reach_beyond_the_window(served: Served, llm: Any, seam: int) -> None:
    ids = (*HEADER, *TOOLS, *tokens(5, 33), *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [{"num_seam_tokens": seam}])
    first = len(HEADER)
    splices = [
        served.splice("tools", first),
        served.splice("policy", first + len(TOOLS) + 33),
    ]
    assert reply.gap(served.logprobs(served.plan(ids, splices, seam))) <= LOGPROB_TOLERANCE
    assert reply.said["loaded_tokens"] == len(TOOLS) + len(POLICY) - 2 * seam


def test_plain_requests_stay_plain(served: Served, llm: Any) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    ask(llm, [ids])
    (plain,) = ask(llm, [ids], [{"splice": False}])
    assert plain.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_a_load_that_fails_is_computed(
    served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def broken(injection: Any) -> None:
        raise MemoryError("no room to move keys")

    monkeypatch.setattr(get_kv_transfer_group()._working, "_put", broken)
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], num_tokens=3)
    assert reply.said["fallback_reason"] == "load_failed"
    assert reply.gap(served.full(ids)) <= LOGPROB_TOLERANCE


def test_a_segment_that_vllm_compiles_is_that_of_the_embedded_engine(
    served: Served, llm: Any
) -> None:
    import torch

    ids = tokens(11, 333)
    (reply,) = ask(llm, [ids], [{"compile": {"name": "made"}}])
    segment = served.store.get(reply.said["segment"])
    expected = served.engine.compile(ids)
    assert segment is not None
    for name in ("keys", "values"):
        for mine, theirs in zip(segment.tensors[name], expected.tensors[name], strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5 * float(theirs.abs().max()))
