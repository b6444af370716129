"""A cache too small for what runs: requests are preempted, evicted, and come back."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_vllm import LOGPROB_TOLERANCE, Served, ask, ask_stock, scheduler, tokens

POLICY, TOOLS, QUESTION = tokens(3, 300), tokens(4, 150), tokens(2, 19)
SMALL = {"num_gpu_blocks_override": 45, "max_model_len": 1024}
"""Two of the requests fit."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"))
    made.compile("policy", POLICY)
    made.compile("tools", TOOLS)
    return made


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm(**SMALL)


def test_preempted_requests_give_the_same_replies(served: Served, llm: Any) -> None:
    """Short cache: each of the requests alone fits, all of them do not."""
    prompts, wishes, expected = [], [], []
    for index in range(9):
        header = tokens(100 + index, 20 + 7 * index)
        ids = (*header, *POLICY, *tokens(200 + index, 30), *TOOLS, *QUESTION)
        second = len(header) + len(POLICY) + 30
        splices = [served.splice("policy", len(header)), served.splice("tools", second)]
        plain = index % 3 == 2
        prompts.append(ids)
        wishes.append({"splice": False} if plain else {"num_seam_tokens": index})
        plan = served.plan(ids, splices, index)
        expected.append(served.full(ids) if plain else served.logprobs(plan))
    count = _count_preemptions(llm)
    together = ask(llm, prompts, wishes, 120)
    assert count[0] > 0  # else this test says nothing
    for reply, reference in zip(together, expected, strict=True):
        assert reply.gap(reference) <= LOGPROB_TOLERANCE
    for ids, wish, reply in zip(prompts, wishes, together, strict=True):
        (alone,) = ask(llm, [ids], [wish], 120)
        assert alone.token_ids == reply.token_ids


def _count_preemptions(llm: Any) -> list[int]:
    counted, preempt = [0], scheduler(llm)._preempt_request

    def counting(*args: Any, **kwargs: Any) -> None:
        counted[0] += 1
        preempt(*args, **kwargs)

    scheduler(llm)._preempt_request = counting
    return counted


def test_what_follows_is_bit_equal_to_a_server_that_never_spliced(served: Served, llm: Any) -> None:
    prompts = [(*tokens(300 + index, 60), *POLICY, *QUESTION) for index in range(3)]
    never = ask_stock(served.model, prompts, 8, SMALL)
    for ids, theirs in zip(prompts, never, strict=True):
        llm.reset_prefix_cache()
        (mine,) = ask(llm, [ids], [{"splice": False}], 8)
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == theirs.logprobs
