"""The other form of a jump: requests are sent to the workers anew."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_vllm import LOGPROB_TOLERANCE, Served, ask, tokens
from test_preemption import POLICY, QUESTION, SMALL, TOOLS
from test_preemption import served as served
from test_preemption import (
    test_preempted_requests_give_the_same_replies as test_preempted_requests_give_the_same_replies,
)


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm(**SMALL, extra={"jump": "requeue"})


def test_several_segments_stand_anywhere(served: Served, llm: Any) -> None:
    header = tokens(1, 41)
    ids = (*header, *TOOLS, *POLICY, *QUESTION)
    (reply,) = ask(llm, [ids], num_tokens=5)
    first = len(header)
    splices = [served.splice("tools", first), served.splice("policy", first + len(TOOLS))]
    assert reply.gap(served.logprobs(served.plan(ids, splices, 1))) <= LOGPROB_TOLERANCE
