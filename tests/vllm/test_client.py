"""Sessions over a real stock server: what it generates, scores and reuses.

The embedded engine with the same weights is the reference, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_pages import DOCS, Page
from helpers_server import NAME, RunningServer, running
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

import kvnotes
from kvnotes import SamplingParams, Session, generate_together
from kvnotes.errors import PlanError, ServerError
from kvnotes.plan import Plan
from kvnotes.session import Model
from kvnotes.vllm import bodies, connect
from kvnotes.vllm.connecting import ServedModel

SCORE_TOLERANCE = 1e-3
"""Of a sum of log-probabilities, in float32: two implementations differ by 1e-5 for a token."""

BLOCK = 32
POLICY = (Path(__file__).resolve().parents[2] / "examples" / "policy.md").read_text()
FEW = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(smollm2_path, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture(scope="module")
def model(server: RunningServer) -> ServedModel:
    return connect(server.url)  # the server says where it has its model from


@pytest.fixture(scope="module")
def embedded() -> Model:
    return kvnotes.load("smollm2-135m", verify_model=False)


def shop(model: Model, policy: str = "", **options: object) -> Session:
    return Session(
        model,
        messages=[
            {"role": "system", "content": "You serve a shop. The order is {{status}}.\n" + policy}
        ],
        fields={"status": "pending"},
        **options,
    )


QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "List three uses of an old tyre, and say why.",
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_are_those_of_the_embedded_engine(
    question: str, model: ServedModel, embedded: Model
) -> None:
    params = SamplingParams(max_new_tokens=24)
    ours, reference = shop(model), shop(embedded)
    for text in (question, "Say it in other words."):
        turn = ours.user(text, generate=params)
        assert turn.token_ids == reference.user(text, generate=params).token_ids
    assert ours.render().token_ids == reference.render().token_ids
    assert ours.messages[-1].content == reference.messages[-1].content


def test_scores_of_choices_are_those_of_the_embedded_engine(
    model: ServedModel, embedded: Model, server: RunningServer
) -> None:
    choices = ["Yes", "No", "Yes, of course", "I cannot say", "Noodles", "No, it is not"]
    turns = [shop(m).user("Has the order left?", decide=choices) for m in (embedded, model)]
    assert turns[0].decision is not None and turns[1].decision is not None
    for choice in choices:
        gap = turns[0].decision.choices[choice] - turns[1].decision.choices[choice]
        assert abs(gap) < SCORE_TOLERANCE, choice
    assert turns[0].decision.chosen == turns[1].decision.chosen


def test_scoring_leaves_the_prefix_cache_on(model: ServedModel, server: RunningServer) -> None:
    session = shop(model, POLICY)
    session.user("Has the order left?", decide=["Yes", "No, it is not"])
    before = server.hits()
    turn = session.decide(["Yes", "No, it is not"])
    asked, found = server.hits_since(before)
    assert turn.served is not None
    size = turn.plan.tokens.total
    assert turn.served.num_cached_tokens == (size - 1) // BLOCK * BLOCK
    assert found > 0.9 * asked > 0  # of the prompt, and of each beginning of a choice


def test_an_erratum_hits_the_prefix_cache_and_a_change_in_front_does_not(
    model: ServedModel, server: RunningServer
) -> None:
    session = shop(model, POLICY)
    session.user("Has the order left?", generate=FEW)
    changed = session.fork()
    before = server.hits()
    session.edit(status="delivered")
    turn = session.user("And now?", generate=FEW)
    asked, found = server.hits_since(before)
    assert (turn.strategy, turn.plan.shape) == ("erratum", "R C")
    assert turn.served is not None and turn.served.num_cached_tokens == found
    assert asked == turn.plan.tokens.total
    assert turn.plan.tokens.reused - BLOCK < found <= turn.plan.tokens.reused
    assert found / asked > 0.9
    before = server.hits()
    changed.edit(status="delivered", strategy="suffix")
    turn = changed.user("And now?", generate=FEW)
    asked, found = server.hits_since(before)
    assert turn.served is not None and turn.served.num_cached_tokens == found < 2 * BLOCK


def test_a_fork_shares_what_the_server_has(model: ServedModel) -> None:
    session = shop(model, POLICY)
    session.user("Has the order left?", generate=FEW)
    fork = session.fork()
    turns = [talk.user(text, generate=FEW) for talk, text in ((session, "Why?"), (fork, "When?"))]
    for turn in turns:
        assert turn.served is not None and turn.served.num_cached_tokens is not None
        assert turn.served.num_cached_tokens > turn.plan.tokens.reused - BLOCK
    assert session.messages[-2].content == "Why?" and fork.messages[-2].content == "When?"


def test_several_sessions_are_generated_at_once_as_each_alone(model: ServedModel) -> None:
    def talk(question: str) -> Session:
        session = shop(model)
        session.user(question)
        return session

    alone = [talk(question).generate(FEW).token_ids for question in QUESTIONS]
    turns = generate_together([talk(question) for question in QUESTIONS], FEW)
    assert [turn.token_ids for turn in turns] == alone


def test_a_stream_comes_piece_by_piece_and_says_the_same(model: ServedModel) -> None:
    params = SamplingParams(max_new_tokens=40)
    session, other = shop(model), shop(model)
    session.user("Write a haiku about rivers.")
    stream, pieces, moments = session.stream(params), [], []
    for piece in stream:
        pieces.append(piece)
        moments.append(time.monotonic())
    whole = other.user("Write a haiku about rivers.", generate=params)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 10 and moments[-1] > moments[0]
    assert stream.turn.ttft_ms is not None and whole.ttft_ms is not None


def test_closing_a_stream_aborts_the_request(model: ServedModel, server: RunningServer) -> None:
    session = shop(model)
    session.user("Write a long story about a river.")
    generated = server.metric("vllm:generation_tokens_total")
    stream = session.stream(SamplingParams(max_new_tokens=2000))
    said = next(stream) + next(stream)
    stream.close()
    for _ in range(100):
        if not server.metric("vllm:num_requests_running"):
            break
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0
    done = server.metric("vllm:generation_tokens_total")
    assert 2 <= done - generated < 500
    time.sleep(1)
    assert server.metric("vllm:generation_tokens_total") == done
    assert session.messages[-1].content == said
    assert session.user("Go on.", generate=FEW).text


def test_end_tokens_and_seeds_are_the_sessions(model: ServedModel) -> None:
    (end,) = model.tokenizer.eos_ids
    text = f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n"
    start = model.engine.execute(Plan.prefill(model.tokenizer.encode(text)))
    said = tuple(model.engine.generate(start, SamplingParams(200), frozenset({end})))
    assert said[-1] == end and end not in said[:-1]
    beyond = tuple(model.engine.generate(start, SamplingParams(len(said) + 5), frozenset()))
    assert beyond[: len(said)] == said and len(beyond) == len(said) + 5
    warm = SamplingParams(12, temperature=1.3, top_p=0.95, top_k=50, seed=-1)
    drawn = [tuple(model.engine.generate(start, warm, frozenset({end}))) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_verify_compares_with_a_clean_prompt_of_the_same_server(
    model: ServedModel, embedded: Model
) -> None:
    def turn(model: Model) -> object:
        session = shop(model, erratum_mode="append")
        session.user("Has the order left?", generate=FEW)
        session.edit(status="delivered", strategy="erratum", verify="full")
        return session.user("And now?", decide=["pending", "delivered"]).verification

    assert turn(model) == turn(embedded)


def test_what_a_stock_server_cannot_do_is_refused_by_name(
    model: ServedModel, server: RunningServer
) -> None:
    session = shop(model)
    asked = server.metric("vllm:request_success_total")
    with pytest.raises(PlanError, match=r"strategy 'refresh\+erratum' needs more than a stock"):
        session.edit(status="delivered", strategy="refresh+erratum")
    assert server.metric("vllm:request_success_total") == asked


def test_the_page_says_what_happens(
    model: ServedModel, server: RunningServer, smollm2_path: Path, tmp_path: Path
) -> None:
    text = (DOCS / "vllm-client.md").read_text(encoding="utf-8")
    page, address = tmp_path / "vllm-client.md", "http://127.0.0.1:8000"
    assert address in text
    page.write_text(text.replace(address, server.url), encoding="utf-8")
    Page(page, tmp_path / "run", smollm2_path.parent).run()


# -- parameters, as vLLM itself reads them -------------------------------------------------------

HOSTILE = {
    "repetition_penalty": 1.3,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "min_p": 0.1,
}
"""Defaults of a model's generation_config.json, which vLLM takes where a request says nothing."""


@BEARTYPE_IN_STRATEGIES
@laws(100)
@given(
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 4096),
        temperature=st.just(0.0) | st.floats(bodies.MIN_TEMPERATURE, bodies.MAX_TEMPERATURE),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 500),
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
    ),
    st.frozensets(st.integers(0, 500), max_size=3),
)
def test_vllm_reads_the_parameters_that_were_meant(
    params: SamplingParams, stops: frozenset[int]
) -> None:
    request = CompletionRequest(prompt=[1], **bodies.sampled(params, stops))
    read = request.to_sampling_params(request.max_tokens, HOSTILE)
    assert (read.temperature, read.max_tokens) == (params.temperature, params.max_new_tokens)
    assert set(read.stop_token_ids) == stops and read.ignore_eos and read.stop == []
    assert (read.repetition_penalty, read.min_p) == (1.0, 0.0)
    assert read.presence_penalty == read.frequency_penalty == 0.0
    assert read.logprobs is None and read.prompt_logprobs is None
    if params.temperature:
        assert (read.top_p, read.top_k) == (params.top_p, params.top_k)
        assert read.seed == params.seed % (1 << 63)
    assert read.skip_reading_prefix_cache is not True


def test_vllm_reads_what_is_wanted_of_choices() -> None:
    request = CompletionRequest(prompt=[[1], [2]], **bodies.scoring((5, 7)))
    read = request.to_sampling_params(1, HOSTILE)
    assert read.logprob_token_ids == [5, 7] and read.max_tokens == 1
    assert read.prompt_logprobs is None and not read.skip_reading_prefix_cache


# -- the end: this test stops the server, so it is the last ---------------------------------------


def test_a_server_that_is_gone_takes_nothing_of_the_session_with_it(
    model: ServedModel, server: RunningServer
) -> None:
    session = shop(model)
    session.user("Has the order left?", generate=FEW)
    before = session.messages
    server.stop()
    with pytest.raises(ServerError, match=r"nobody answers there|the connection broke"):
        session.user("And now?", generate=FEW)
    with pytest.raises(ServerError, match="nobody answers there") as caught:
        connect(server.url, model=NAME)
    assert server.url in caught.value.message
    assert session.messages == before
