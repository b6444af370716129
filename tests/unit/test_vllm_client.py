"""Sessions over a server that answers as vLLM does: what is sent, what is read, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_served import BLOCK, FakeVLLM, fake, tokenizer_folder
from hypothesis import example, given
from hypothesis import strategies as st

from kvnotes import KVStore, SamplingParams, SegmentText, Session, generate_together
from kvnotes.errors import (
    EngineError,
    OutOfCacheError,
    PlanError,
    ServerError,
    SpecMismatchError,
    StorageError,
)
from kvnotes.plan import Match, Plan, plan_keep
from kvnotes.vllm import bodies
from kvnotes.vllm.choices import reads, sums
from kvnotes.vllm.connecting import ServedModel
from kvnotes.vllm.streams import ENDED_EARLY

FEW = SamplingParams(max_new_tokens=5)
HEADER = "You are a short and friendly helper.\nstatus: {{status}}\n" + "The stock is 12. " * 4
POLICY = "Never sell below the price. " * 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def server() -> FakeVLLM:
    return fake()


@pytest.fixture
def model(server: FakeVLLM, folder: Path) -> ServedModel:
    return server.connect(folder)


def shop(model: ServedModel, **options: Any) -> Session:
    return Session(
        model,
        messages=[{"role": "system", "content": HEADER}],
        fields={"status": "low"},
        **options,
    )


def greedy(server: FakeVLLM, ids: tuple[int, ...], stops: frozenset[int], limit: int) -> list[int]:
    """What the model says, computed without any of the client."""
    made: list[int] = []
    while len(made) < limit and not (made and made[-1] in stops):
        made.append(int(server.log_probs((*ids, *made)).argmax()))
    return made


# -- what is generated ---------------------------------------------------------------------------


def test_a_reply_is_what_the_model_generates_and_goes_on_as_generated(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    turn = session.user("Is it low?", generate=SamplingParams(9))
    prompt = tuple(server.prompts[0])
    assert turn.prompt is not None and prompt == turn.prompt.token_ids
    assert list(turn.token_ids) == greedy(server, prompt, model.tokenizer.eos_ids, 9)
    session.user("And now?", generate=FEW)
    again = server.prompts[1]
    assert again[: len(prompt)] == list(prompt)
    assert again[len(prompt) : len(prompt) + 9] == list(turn.token_ids)


def test_end_tokens_end_a_reply_and_are_part_of_it(server: FakeVLLM, model: ServedModel) -> None:
    (end,) = model.tokenizer.eos_ids
    hashed = server.log_probs

    def ends(ids: tuple[int, ...]) -> np.ndarray:
        row = hashed(ids).copy()
        if len(server.prompts) and len(ids) == len(server.prompts[-1]) + 3:
            row[end] = 0.0
        return row

    server.log_probs = ends
    turn = shop(model).user("Is it low?", generate=SamplingParams(9))
    assert len(turn.token_ids) == 4 and turn.token_ids[-1] == end
    assert turn.notices == ()
    assert server.bodies[-1]["stop_token_ids"] == [end]


def test_a_server_that_knows_ids_in_words_only_gives_the_same_reply(folder: Path) -> None:
    old = fake(knows_ids=False)
    turns = []
    for server in (old, fake()):
        session = shop(server.connect(folder))
        turns.append(session.user("Is it low?", generate=SamplingParams(9)))
    assert turns[0].token_ids == turns[1].token_ids
    assert "return_token_ids" not in old.bodies[-1]


def test_text_comes_in_pieces_as_it_is_generated(server: FakeVLLM, model: ServedModel) -> None:
    session = shop(model)
    session.user("Is it low?")
    stream = session.stream(SamplingParams(12))
    pieces = [next(stream)]
    assert server.aborted == 0
    ttft = stream.turn.ttft_ms
    assert ttft is not None and ttft > 0 and stream.turn.served is not None
    assert stream.turn.served.num_cached_tokens is None  # a server says that at the end
    pieces += list(stream)
    assert len(pieces) > 3 and session.messages[-1].content == "".join(pieces)
    assert stream.turn.served.num_cached_tokens == 0
    assert stream.turn.ttft_ms == ttft


def test_a_stream_that_is_closed_is_aborted_and_its_text_stays(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    session.user("Is it low?")
    stream = session.stream(SamplingParams(200))
    said = next(stream) + next(stream)
    stream.close()
    assert server.aborted == 1
    assert session.messages[-1].content == said
    assert ENDED_EARLY in stream.turn.notices
    prompt, kept = server.prompts[-1], session.messages[-1].generated_ids
    session.user("Go on.", generate=FEW)
    assert kept and server.prompts[-1][: len(prompt) + len(kept)] == [*prompt, *kept]


def test_closing_a_generation_closes_its_connection_at_once(
    server: FakeVLLM, model: ServedModel
) -> None:
    start = model.engine.execute(Plan.prefill(model.tokenizer.encode("The stock is 12 units.")))
    generation = model.engine.generate(start, SamplingParams(50))
    tokens = iter(generation)
    said = [next(tokens), next(tokens)]
    generation.close()
    assert server.aborted == 1
    assert list(tokens) == [] and list(generation.token_ids) == said
    assert generation.cache.length == start.cache.length + 1


def test_the_time_to_the_first_token_is_that_of_the_reply(
    server: FakeVLLM, model: ServedModel
) -> None:
    server.fail = lambda request: time.sleep(0.2)
    session = shop(model)
    turns = [session.user("Is it low?", generate=FEW), session.decide(["yes", "no"])]
    for turn in turns:
        assert turn.served is not None and turn.ttft_ms is not None
        assert turn.ttft_ms > turn.served.ttft_ms > 200
    stream = session.stream(FEW)
    next(stream)
    assert (stream.turn.ttft_ms or 0) > 200


def test_a_stop_string_aborts_what_would_come_behind_it(
    server: FakeVLLM, model: ServedModel
) -> None:
    free = shop(model).user("Is it low?", generate=SamplingParams(40)).text
    assert free is not None
    stop = free[len(free) // 3 : len(free) // 3 + 2]
    turn = shop(model).user("Is it low?", generate=SamplingParams(40, stop=(stop,)))
    assert turn.text == free[: free.index(stop)]
    assert server.aborted == 1
    assert server.bodies[-1]["stop"] == []


def test_several_sessions_generate_at_once_what_each_generates_alone(
    server: FakeVLLM, model: ServedModel
) -> None:
    def talk(question: str) -> Session:
        session = shop(model)
        session.user(question)
        return session

    questions = ("Is it low?", "Is it high?", "Why?")
    alone = [talk(question).generate(FEW).token_ids for question in questions]
    asked = len(server.bodies)
    together = generate_together([talk(question) for question in questions], FEW)
    assert [turn.token_ids for turn in together] == alone
    assert len(server.bodies) == asked + 3
    assert all(turn.served and turn.ttft_ms for turn in together)


def test_a_reply_shorter_than_asked_for_by_the_servers_limit_says_so(
    server: FakeVLLM, model: ServedModel
) -> None:
    server.end_after = 3
    turn = shop(model).user("Is it low?", generate=FEW)
    assert len(turn.token_ids) == 3
    assert "the server ended the reply after 3 of 5 tokens" in turn.notices


# -- sampling parameters -------------------------------------------------------------------------

PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 4096),
    temperature=st.just(0.0) | st.floats(bodies.MIN_TEMPERATURE, bodies.MAX_TEMPERATURE),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 500),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
)


@BEARTYPE_IN_STRATEGIES
@laws(200)
@given(PARAMS, st.frozensets(st.integers(0, 500), max_size=3))
def test_parameters_go_to_the_server_as_they_are(
    params: SamplingParams, stops: frozenset[int]
) -> None:
    said = bodies.sampled(params, stops)
    back = SamplingParams(
        max_new_tokens=said["max_tokens"],
        temperature=said["temperature"],
        top_p=said["top_p"],
        top_k=said["top_k"],
        seed=params.seed,
    )
    assert back == params and set(said["stop_token_ids"]) == stops
    assert said.keys() >= bodies.NEUTRAL.keys()
    assert ("seed" in said) == (params.temperature > 0)
    assert 0 <= said.get("seed", 0) < 1 << 63


@pytest.mark.parametrize("temperature", [1e-5, 0.009, 2.01, 50.0])
def test_a_temperature_that_the_server_would_change_is_refused(
    temperature: float, server: FakeVLLM, model: ServedModel
) -> None:
    asked = len(server.bodies)
    session = shop(model)
    with pytest.raises(EngineError, match=f"temperature {temperature} is asked for, vLLM samples"):
        session.user("Is it low?", generate=SamplingParams(5, temperature=temperature))
    assert len(server.bodies) == asked and len(session.messages) == 1


# -- scores --------------------------------------------------------------------------------------


def test_scores_are_summed_log_probabilities_of_the_choices(
    server: FakeVLLM, model: ServedModel
) -> None:
    choices = ["yes", "no", "yes, the price", "yes, the price is low"]
    turn = shop(model).user("Is it low?", decide=choices)
    (end,) = model.tokenizer.eos_ids
    prompt = tuple(server.prompts[0])
    assert turn.decision is not None
    for choice in choices:
        ids = (*model.tokenizer.encode(choice), end)  # "yes" begins another
        steps = [server.log_probs((*prompt, *ids[:k]))[ids[k]] for k in range(len(ids))]
        assert turn.decision.choices[choice] == pytest.approx(sum(steps), abs=1e-9)
    assert "prompt_logprobs" not in {key for body in server.bodies for key in body}
    assert len(server.bodies) == 3  # the probe, the prompt, and every beginning at once


@laws(60)
@example([[i, 300 - i] for i in range(200)])
@example([[i, 4 * i + k] for i in range(50) for k in range(4)])
@example([[7, i] for i in range(200)])
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=3), min_size=1, max_size=200))
def test_every_step_of_every_choice_is_asked_for_within_the_servers_limits(
    choices: list[list[int]],
) -> None:
    def value(ids: tuple[int, ...]) -> float:
        return -float(sum((k + 1) * i for k, i in enumerate(ids)))

    found = {}
    asked = reads(choices)
    assert asked[0].beginnings == ((),)
    for read in asked:
        assert 1 <= len(read.wanted) <= bodies.MAX_WANTED and len(read.beginnings) <= 64
        for beginning in read.beginnings:
            for token in read.wanted:
                found[(*beginning, token)] = value((*beginning, token))
    wanted = [sum(value(tuple(c[: k + 1])) for k in range(len(c))) for c in choices]
    assert sums(choices, found) == pytest.approx(wanted)


def test_logits_are_not_taken_for_log_probabilities(server: FakeVLLM, model: ServedModel) -> None:
    hashed = server.log_probs
    server.log_probs = lambda ids: hashed(ids) + 20
    with pytest.raises(ServerError, match="above 0: logits"):
        shop(model).user("Is it low?", decide=["yes", "no"])


def test_a_server_that_gives_other_log_probabilities_is_refused(folder: Path) -> None:
    server = fake(knows_scores=False)
    with pytest.raises(ServerError, match="the server gives none of token"):
        shop(server.connect(folder)).user("Is it low?", decide=["yes", "no"])


def test_choices_without_tokens_are_refused(model: ServedModel) -> None:
    start = model.engine.execute(Plan.prefill((1, 2, 3)))
    for choices in ([], [(1,), ()]):
        with pytest.raises(EngineError, match="a choice to score has no tokens"):
            model.engine.score(start, choices)


# -- edits ---------------------------------------------------------------------------------------


def test_errata_leave_what_was_sent_as_it_was_and_the_server_hits_it(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    session.user("Is it low?", generate=FEW)
    for number, status in enumerate(("high", "low", "high"), 1):
        turn = session.edit(status=status)
        assert (turn.strategy, turn.evidence.kind) == ("erratum", "engine")
        turn = session.user(f"And now, {number}?", generate=FEW)
        assert turn.plan.shape == "R C" and turn.fallback_reason is None
        assert turn.served is not None
        # all whole blocks before what is new
        kept = turn.plan.tokens.reused
        assert kept - BLOCK < turn.served.num_cached_tokens <= kept
    errata = [m for m in session.messages if m.is_erratum]
    assert [m.erratum_of for m in errata] == ["status"] * 3
    for before, after in pairwise(server.prompts):
        assert after[: len(before)] == before
    assert server.aborted == 0


def test_a_limit_of_errata_consolidates_and_says_so(model: ServedModel) -> None:
    session = shop(model)
    for number in range(5):
        session.edit(status=f"level {number}")
        turn = session.user("And now?", generate=FEW)
        session.user("Well.", decide=["yes", "no"])
    assert turn.strategy == "erratum"
    session.edit(status="gone")
    turn = session.user("And now?", generate=FEW)
    assert turn.strategy == "suffix"
    assert "consolidated: status has 4 errata" in (turn.fallback_reason or "")


@pytest.mark.parametrize("strategy", ["suffix", "reprefill"])
def test_exact_strategies_show_the_new_value_in_its_place(
    strategy: str, server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model, strategy=strategy)
    session.user("Is it low?", generate=FEW)
    session.edit(status="high")
    turn = session.user("And now?", generate=FEW)
    assert turn.strategy == strategy
    text = model.tokenizer.decode(server.prompts[-1])
    assert "status: high" in text and "low" not in text.replace("Is it low?", "")
    assert turn.served is not None and turn.served.num_cached_tokens is not None
    assert turn.served.num_cached_tokens < turn.plan.tokens.total // 3


REFUSED = ("refresh", "refresh+erratum", "selective", "swap")


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("strategy", REFUSED)
def test_strategies_that_need_the_cache_are_refused_by_name_before_any_request(
    strategy: str, plugin: bool, folder: Path
) -> None:
    server = fake(segments={} if plugin else None)
    model = server.connect(folder)
    session = shop(model)
    asked = len(server.bodies)
    calls: list[Callable[[], object]] = [
        lambda: shop(model, strategy=strategy),
        lambda: session.edit(status="high", strategy=strategy),
        lambda: session.delete("m0", strategy=strategy),
    ]
    for call in calls:
        with pytest.raises(PlanError) as caught:
            call()
        assert f"strategy {strategy!r} needs more than a" in caught.value.message
        assert "vLLM server" in caught.value.message
        assert "'erratum', 'suffix' or 'reprefill'" in caught.value.hint
    assert len(server.bodies) == asked
    assert session.user("Is it low?", generate=FEW).text


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda model: shop(model, erratum_mode="rewrite"), "erratum mode 'rewrite'"),
        (lambda model: shop(model, splice="always"), "splice 'always'"),
        (lambda model: shop(model).edit(status="high", verify="cheap"), "verify 'cheap'"),
        (lambda model: shop(model).decide(["a", "b"], compare=True), "compare=True"),
        (lambda model: shop(model).edit(status="x", strategy="stale"), "strategy 'stale'"),
    ],
)
def test_what_else_needs_the_cache_is_refused_by_name(
    call: Callable[[ServedModel], object], what: str, server: FakeVLLM, model: ServedModel
) -> None:
    asked = len(server.bodies)
    with pytest.raises(PlanError, match=what):
        call(model)
    assert len(server.bodies) == asked


@pytest.mark.parametrize("asked", [{"decide": ["yes", "no"]}, {"generate": FEW}])
@pytest.mark.parametrize("obeys", [True, False])
def test_verify_full_takes_what_decides_as_a_clean_prompt(
    obeys: bool, asked: dict[str, Any], server: FakeVLLM, model: ServedModel
) -> None:
    hashed = server.log_probs
    yes, no = (model.tokenizer.encode(word)[0] for word in ("yes", "no"))

    def decides(ids: tuple[int, ...]) -> np.ndarray:
        text, row = model.tokenizer.decode(ids), hashed(ids).copy()
        clean = "status: high" in text
        row[[yes, no]] = (0, -50) if clean or (obeys and "STATE UPDATE" in text) else (-50, 0)
        return row

    session = shop(model)
    session.user("Is it low?", generate=FEW)
    server.log_probs = decides
    session.edit(status="high", verify="full")
    turn = session.user("And now?", **asked)
    assert turn.verification is not None and turn.verification.agreed
    assert turn.verification.rungs == (("erratum",) if obeys else ("erratum", "suffix"))
    assert turn.token_ids[:1] in ((), (yes,))
    assert turn.served is not None and turn.ttft_ms is not None
    assert turn.ttft_ms > turn.served.ttft_ms


def test_a_change_behind_which_something_stood_is_computed_again(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    session.add("user", "First question about the price.", id="first")
    session.user("Second question.", generate=FEW)
    session.delete("first", strategy="erratum")
    turn = session.user("Third.", generate=FEW)
    assert turn.plan.shape == "R C"
    assert any("behind_a_change:not_on_a_server:computed" in n for n in turn.notices)
    assert "First question" not in model.tokenizer.decode(server.prompts[-1])


def test_a_plan_that_keeps_what_no_server_has_is_refused(model: ServedModel) -> None:
    engine = model.engine
    base = engine.prefill(tuple(range(5, 25))).cache
    ids = (*range(5, 10), 99, *range(10, 25), 7)
    plan = plan_keep(
        base.layout, [Match(0, 0, 5), Match(5, 6, 15)], Plan.prefill(ids), strategy="refresh"
    )
    with pytest.raises(PlanError, match="unchanged from the first token on, and nothing else"):
        engine.execute(plan, base=base)


# -- what sessions do besides --------------------------------------------------------------------


def test_a_fork_goes_its_own_way(server: FakeVLLM, model: ServedModel) -> None:
    session = shop(model)
    session.user("Is it low?", generate=FEW)
    fork = session.fork()
    fork.edit(status="high")
    fork.user("And now?", generate=FEW)
    turn = session.user("Why?", generate=FEW)
    assert session.values["status"] == "low" and fork.values["status"] == "high"
    assert not any(m.is_erratum for m in session.messages)
    assert turn.plan.shape == "R C"
    assert turn.served is not None and (turn.served.num_cached_tokens or 0) > 40


def test_a_sub_agents_prompt_is_computed_once_for_both(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    turns = []

    def work(agent: Session) -> str:
        turns.append(agent.user("Look.", generate=FEW))
        return "done"

    session.delegate("You look.", work, role="user")
    turns.append(session.generate(FEW))
    assert all((t.served.num_cached_tokens or 0) > 40 for t in turns if t.served)


def test_consolidating_computes_the_clean_prompt_now(server: FakeVLLM, model: ServedModel) -> None:
    session = shop(model)
    session.user("Is it low?", generate=FEW)
    session.edit(status="high")
    session.user("And now?", generate=FEW)
    computed = server.computed
    turn = session.consolidate()
    assert server.computed > computed + 40 and turn.served is not None
    turn = session.user("Why?", generate=FEW)
    assert turn.served is not None and turn.plan.shape == "R C"
    assert turn.plan.tokens.reused - BLOCK < (turn.served.num_cached_tokens or 0)


def test_a_saved_session_goes_on_with_what_the_server_still_has(
    server: FakeVLLM, folder: Path, tmp_path: Path
) -> None:
    store = KVStore(tmp_path)
    session = shop(server.connect(folder), id="talk")
    session.user("Is it low?", generate=FEW)
    session.save(store)
    with pytest.raises(StorageError, match=r"no folder|no saved session"):
        session.save()
    loaded = Session.load(server.connect(folder), "talk", store)
    loaded.edit(status="high")
    turn = loaded.user("And now?", generate=FEW)
    assert (turn.strategy, turn.plan.shape) == ("erratum", "R C")
    assert turn.served is not None and (turn.served.num_cached_tokens or 0) > 40
    assert server.prompts[-1][: len(server.prompts[0])] == server.prompts[0]


def test_what_does_not_fit_is_refused_before_any_request(folder: Path) -> None:
    server = fake(max_model_len=150)
    model = server.connect(folder)
    asked = len(server.bodies)
    session = shop(model)
    with pytest.raises(OutOfCacheError, match="has 150 here, because its server has that"):
        session.user("Is it low? " * 30, generate=FEW)
    with pytest.raises(OutOfCacheError):
        session.user("Is it low?", generate=SamplingParams(100))
    start = model.engine.execute(Plan.prefill(tuple(range(148))))
    with pytest.raises(OutOfCacheError, match="prompt and choices"):
        model.engine.score(start, [(1, 2, 3)])
    assert len(server.bodies) == asked
    assert session.user("Is it low?", generate=FEW).text


def test_what_needs_k_v_or_logits_is_refused_with_the_reason(model: ServedModel) -> None:
    engine = model.engine
    start = engine.execute(Plan.prefill((1, 2, 3)))
    ids, positions = (1, 2), torch.arange(2)
    calls: list[Callable[[], object]] = [
        lambda: engine.compile((1, 2)),
        lambda: engine.note_scores(start.cache, (1, 2, 3), ()),
        lambda: engine.note_score_share,
        lambda: engine.masked_forward(ids, positions, torch.ones(2, 2, dtype=torch.bool), (1,)),
        lambda: engine.own_forward(ids),
        lambda: engine.step([]),
        start.last_logits,
        lambda: model.book.add("x", engine.stand_in(start.cache.layout[0].run)),
    ]
    for call in calls:
        with pytest.raises(EngineError) as caught:
            call()
        assert "server" in caught.value.message and caught.value.hint


# -- what the server says ------------------------------------------------------------------------


def test_a_server_that_does_not_say_what_it_had_is_reported_as_such(folder: Path) -> None:
    server = fake(tells_cached=False)
    session = shop(server.connect(folder))
    for turn in (
        session.user("Is it low?", generate=FEW),
        session.user("Is it?", decide=["yes", "no"]),
    ):
        assert turn.served is not None and turn.served.num_cached_tokens is None
        assert [n for n in turn.notices if "--enable-prompt-tokens-details" in n]


def test_a_reply_after_a_restart_says_that_nothing_was_cached(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = shop(model)
    session.user("Is it low?", generate=FEW)
    server.cached.clear()
    turn = session.user("And now?", decide=["yes", "no"])
    assert turn.plan.shape == "R C"  # what was sent before; what was reused says the server
    assert turn.served is not None and turn.served.num_cached_tokens == 0


# -- with the plug-in ----------------------------------------------------------------------------


def with_policy(model: ServedModel, **options: Any) -> Session:
    return Session(
        model,
        messages=[
            {"role": "system", "content": "You help.\n"},
            {"role": "system", "segment": "policy@2"},
            {"role": "system", "content": "status: {{status}}\n"},
        ],
        fields={"status": "low"},
        segments={"policy@2": SegmentText("policy@2", POLICY)},
        **options,
    )


def compiled(session: Session) -> dict[str, tuple[int, ...]]:
    return {span.name: span.token_ids for span in session.render().segments}


def wishes(server: FakeVLLM) -> list[Any]:
    return [body.get("kv_transfer_params", {}).get("kvnotes") for body in server.bodies[1:]]


def test_segments_are_named_to_the_plug_in_and_its_splice_is_reported(folder: Path) -> None:
    server = fake(segments={})
    model = server.connect(folder)
    session = with_policy(model)
    server.segments = compiled(session)
    turn = session.user("Is it low?", decide=["yes", "no"])
    assert turn.plan.shape == "C R' C"
    assert turn.served is not None
    assert turn.served.num_spliced_tokens == len(server.segments["policy@2"])
    assert turn.fallback_reason is None
    session.edit(status="high")
    turn = session.user("And now?", generate=FEW)
    assert turn.served is not None and turn.served.num_spliced_tokens is not None
    assert turn.served.num_cached_tokens is not None  # asked before the stream, which is silent
    seam = {"num_seam_tokens": session._talk.planner.num_seam_tokens}
    assert wishes(server)[0] == {"segments": ["policy@2"], "values": {}, **seam}
    assert all(wish == wishes(server)[0] for wish in wishes(server))


def test_a_segment_that_the_server_has_not_is_computed_and_that_is_said(folder: Path) -> None:
    server = fake(segments={})
    session = with_policy(server.connect(folder))
    turn = session.user("Is it low?", generate=FEW)
    assert turn.fallback_reason == "the server computed what was to be spliced: no_segment"


def test_of_two_segments_the_one_that_is_missing_is_named(folder: Path) -> None:
    server = fake(segments={})
    session = with_policy(server.connect(folder))
    session.splice(SegmentText("refunds", "A refund goes back to the card. " * 20))
    server.segments = {n: ids for n, ids in compiled(session).items() if n != "refunds"}
    turn = session.user("Is it low?", decide=["yes", "no"])
    # behind a field it is computed by plan; spliced by the user's word it is missing
    assert turn.fallback_reason is None
    session = with_policy(server.connect(folder), splice="always")
    session.splice(SegmentText("refunds", "A refund goes back to the card. " * 20))
    turn = session.user("Is it low?", decide=["yes", "no"])
    assert turn.fallback_reason == (
        "the server computed what was to be spliced: no segment refunds"
    )


def test_a_variant_is_chosen_by_the_values_of_its_preamble(folder: Path) -> None:
    server = fake(segments={})
    text = SegmentText(
        "policy", POLICY, preamble="status: {{status}}\n", variants=(("status", ("low", "high")),)
    )
    session = Session(
        server.connect(folder),
        messages=[
            {"role": "system", "content": "You help. status: {{status}}\n"},
            {"role": "system", "segment": "policy"},
        ],
        fields={"status": "low"},
        segments={"policy": text},
    )
    session.user("Is it low?", decide=["yes", "no"])
    assert wishes(server)[0]["segments"] == ["policy"]
    assert wishes(server)[0]["values"] == {"status": "low"}


def test_the_seam_of_a_session_is_the_servers_too(folder: Path) -> None:
    server = fake(segments={})
    session = with_policy(server.connect(folder), num_seam_tokens=7)
    session.user("Is it low?", decide=["yes", "no"])
    assert wishes(server)[0]["num_seam_tokens"] == 7


@pytest.mark.parametrize("strategy", ["reprefill"])
def test_a_plan_without_splices_forbids_them(strategy: str, folder: Path) -> None:
    server = fake(segments={})
    session = with_policy(server.connect(folder))
    server.segments = compiled(session)
    session.user("Is it low?", decide=["yes", "no"])
    session.edit(status="high", strategy=strategy)
    turn = session.user("And now?", decide=["yes", "no"])
    assert wishes(server)[-1] == {"splice": False}
    assert turn.served is not None and turn.served.num_spliced_tokens is None


def test_a_stock_server_is_sent_nothing_of_segments_and_computes_them(
    server: FakeVLLM, model: ServedModel
) -> None:
    session = with_policy(model)
    turn = session.user("Is it low?", generate=FEW)
    assert turn.plan.shape == "C" and turn.fallback_reason is None
    assert all("kv_transfer_params" not in body for body in server.bodies[1:])
    assert POLICY.strip() in model.tokenizer.decode(server.prompts[-1])


# -- connecting ----------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_with_both_names(tmp_path: Path) -> None:
    other = tokenizer_folder(tmp_path / "qwen", "mistral")
    server = fake()
    with pytest.raises(SpecMismatchError) as caught:
        server.connect(other)
    assert "tiny at http://gpu-1:8000" in caught.value.message and "qwen" in caught.value.message
    assert "tokenizer=" in caught.value.hint


def test_the_tokenizer_is_compared_by_tokenize_where_replies_do_not_say_it(
    tmp_path: Path, folder: Path
) -> None:
    server = fake(knows_ids=False)
    assert server.connect(folder).engine.facts.ids == tuple(bodies.IDS_IN_WORDS.items())
    with pytest.raises(SpecMismatchError):
        server.connect(tokenizer_folder(tmp_path, "mistral"))


def test_which_model_is_served_has_to_be_clear(folder: Path) -> None:
    server = fake(served=("small", "large"))
    with pytest.raises(ServerError, match="serves small, large, and no model is named"):
        server.connect(folder)
    with pytest.raises(ServerError, match=r"'lrge' is asked for, .* serves small, large") as caught:
        server.connect(folder, model="lrge")
    assert "large" in caught.value.hint
    model = server.connect(folder, model="large")
    shop(model).user("Is it low?", generate=FEW)
    assert model.name == server.bodies[-1]["model"] == "large"


def test_the_context_is_the_servers(folder: Path) -> None:
    assert fake(max_model_len=777).connect(folder).engine.spec.max_positions == 777


def test_a_model_without_weights_is_enough(folder: Path) -> None:
    assert not list(folder.glob("*.safetensors"))
    assert fake().connect(folder).tokenizer.encode("price")


# -- refresh -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["refresh", "refresh+erratum"])
def test_a_refresh_says_what_stood_at_the_field(strategy: str, folder: Path) -> None:
    server = fake(segments={})
    model = server.connect(folder, refresh=True)
    session = shop(model, strategy=strategy, erratum_mode="rewrite")
    session.user("Is it low?", generate=FEW)
    before = server.prompts[-1]
    size = len(model.tokenizer.encode("status: low"))
    words = map("".join, product("tiresanw", repeat=3))
    session.edit(
        status=next(w for w in words if len(model.tokenizer.encode(f"status: {w}")) == size)
    )
    turn = session.user("And now?", generate=FEW)
    assert turn.strategy == strategy
    said = next(
        wish["refresh"]
        for body in reversed(server.bodies)
        if (wish := (body.get("kv_transfer_params") or {}).get("kvnotes", {})) and "refresh" in wish
    )
    start, ids = said["start"], said["token_ids"]
    assert list(before[start : start + len(ids)]) == ids
    after = server.prompts[-1]
    assert list(after[start : start + len(ids)]) != ids
    assert tuple(after[:start]) == tuple(before[:start])
    stop = start + len(ids)
    assert tuple(after[stop : len(before)]) == tuple(before[stop:])
    assert (strategy == "refresh+erratum") == ("erratum" in str(turn.strategy))


def test_a_refresh_of_another_length_is_computed(folder: Path) -> None:
    server = fake(segments={})
    session = shop(server.connect(folder, refresh=True), strategy="refresh")
    session.user("Is it low?", generate=FEW)
    session.edit(status="a much longer value than before, of many more tokens")
    asked = len(server.bodies)
    session.user("And now?", generate=FEW)
    for body in server.bodies[asked:]:
        assert "refresh" not in (body.get("kv_transfer_params") or {}).get("kvnotes", {})
