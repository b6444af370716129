"""Everything at once: plain, spliced, variants, aborted, damaged, in a cache that is too small.

KVNOTES_MIXED=1000 takes a thousand requests, some minutes.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
from helpers_vllm import (
    LOGPROB_TOLERANCE,
    Served,
    ask,
    ask_stock,
    connector,
    params,
    reply_of,
    scheduler,
    tokens,
)

NUM_REQUESTS = int(os.environ.get("KVNOTES_MIXED", "100"))
SMALL = {"num_gpu_blocks_override": 60, "max_model_len": 1024}
NUM_AT_ONCE = 12


@dataclass(frozen=True)
class Case:
    """A request and what it should give.

    Args:
        ids: The prompt.
        wish: What it asks of the plug-in.
        names: Segments that are spliced into it, with their places.
        seam: Seam tokens.
        aborted_after: Steps after which it is aborted; None: never.
    """

    ids: tuple[int, ...]
    wish: dict[str, Any] | None
    names: tuple[tuple[str, int], ...] = ()
    seam: int = 1
    aborted_after: int | None = None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    made = Served(tmp_path_factory.mktemp("served"))
    for number in range(5):
        made.compile(f"s{number}", tokens(50 + number, 80 + 40 * number))
    for value in ("gold", "silver"):
        made.compile("tier", tokens(60, 120), tokens(61 + len(value), 12), (("tier", value),))
    return made


@pytest.fixture(scope="module")
def llm(served: Served) -> Any:
    return served.llm(**SMALL)


def cases(served: Served, number: int) -> list[Case]:
    """Return requests of all kinds, in a random order that is always the same."""
    chosen, made = random.Random(7), []
    for index in range(number):
        kind = index % 10
        header = tokens(1000 + chosen.randrange(6), 20 + 13 * chosen.randrange(5))
        question = tokens(2000 + index, 10 + chosen.randrange(30))
        ids, names, wish = list(header), [], None
        seam = chosen.choice((0, 1, 1, 16))
        if kind == 9:
            value = chosen.choice(("gold", "silver"))
            names.append((f"tier{value}", len(ids)))
            ids += served.segments[f"tier{value}"].run.token_ids
            wish = {"values": {"tier": value}, "num_seam_tokens": seam}
        else:
            for name in chosen.sample([f"s{i}" for i in range(5)], 1 + chosen.randrange(3)):
                if len(ids) + len(served.segments[name].run) > 700:
                    continue
                names.append((name, len(ids)))
                ids += served.segments[name].run.token_ids
                ids += tokens(3000 + index, chosen.randrange(40))
            wish = {"num_seam_tokens": seam}
        if kind in (3, 6):
            names, wish = [], {"splice": False}
        if kind == 8:  # a damaged file: see below
            names, ids = [], [*header, *tokens(4000 + index, 90)]
            wish = None
        aborted = chosen.randrange(6) if kind == 7 else None
        made.append(Case((*ids, *question), wish, tuple(names), seam, aborted))
    chosen.shuffle(made)
    return made


def damage(served: Served, number: int) -> None:
    """Put segments into the store that cannot be opened, for every tenth request."""
    for index in range(8, number, 10):
        entry = served.store.put(served.engine.compile(tokens(4000 + index, 90)))
        assert entry is not None
        path = served.store.path(entry.key)
        assert path is not None
        if index % 20 == 8:
            path.unlink()
            continue
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.chmod(0o600)
        path.write_bytes(bytes(content))


def test_no_reply_is_mixed_up_and_nothing_stays_behind(served: Served, llm: Any) -> None:
    damage(served, NUM_REQUESTS)
    connector(llm)._index.refresh(now=True)
    wanted = cases(served, NUM_REQUESTS)
    engine, waiting, running = llm.llm_engine, list(enumerate(wanted)), {}
    gaps: list[float] = []
    while waiting or running:
        while waiting and len(running) < NUM_AT_ONCE:
            index, case = waiting.pop(0)
            engine.add_request(
                str(index), {"prompt_token_ids": list(case.ids)}, params(case.wish, 1 + index % 40)
            )
            running[str(index)] = (case, 0)
        for output in engine.step():
            if output.finished:
                case, _ = running.pop(output.request_id)
                gaps.append(reply_of(output).gap(_expected(served, case)))
        for name, (case, steps) in list(running.items()):
            running[name] = case, steps + 1
            if case.aborted_after == steps:
                engine.abort_request([name])
                del running[name]
    assert max(gaps) <= LOGPROB_TOLERANCE
    assert len(gaps) >= 0.85 * NUM_REQUESTS
    assert not connector(llm)._tracked and not scheduler(llm).running
    pool = scheduler(llm).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def _expected(served: Served, case: Case) -> Any:
    if not case.names:
        return served.full(case.ids)
    splices = [served.splice(name, start) for name, start in case.names]
    return served.logprobs(served.plan(case.ids, splices, case.seam))


def test_plain_requests_afterwards_are_bit_equal(served: Served, llm: Any) -> None:
    prompts = [case.ids for case in cases(served, 40) if case.names][:4]
    never = ask_stock(served.model, prompts, 6, SMALL)
    for ids, theirs in zip(prompts, never, strict=True):
        llm.reset_prefix_cache()
        (mine,) = ask(llm, [ids], [{"splice": False}], 6)
        assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
