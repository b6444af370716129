"""Two workers, half of the heads each."""

from __future__ import annotations

import os
from typing import Any

import pytest
from helpers_vllm import LOGPROB_TOLERANCE, Served, ask, tokens

HEADER, QUESTION, POLICY = tokens(1, 41), tokens(2, 19), tokens(3, 300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"))
    made.compile("policy", POLICY)
    return made


@pytest.fixture(scope="module")
def llm(served: Served, monkeypatch_module: pytest.MonkeyPatch) -> Any:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two workers take a CPU each")
    monkeypatch_module.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[1]}")
    return served.llm(tensor_parallel_size=2)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("seam", [0, 16])
def test_every_worker_puts_in_its_heads(served: Served, llm: Any, seam: int) -> None:
    ids = (*HEADER, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], [{"num_seam_tokens": seam}], 3)
    plan = served.plan(ids, [served.splice("policy", len(HEADER))], seam)
    assert reply.gap(served.logprobs(plan)) <= LOGPROB_TOLERANCE
    assert reply.said["loaded_tokens"] == len(POLICY) - seam


def test_one_of_several_workers_compiles_nothing(served: Served, llm: Any) -> None:
    (reply,) = ask(llm, [tokens(9, 90)], [{"compile": {"name": "x"}}])
    assert reply.said["fallback_reason"] == "compile_needs_one_worker"
