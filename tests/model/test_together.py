"""Several replies in common passes: each is the one it would be alone."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_matrix import tiny_model as tiny_model_of
from helpers_models import engine, engine_of, kv_gap, relative_gap, snapshot, tokens
from helpers_prompt import family_tokenizer
from helpers_session import POLICY, gap_to_mask, rebuilt, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvnotes import SamplingParams, Session, generate_together
from kvnotes.engine import execute, hf
from kvnotes.engine.base import Execution, Fed
from kvnotes.engine.generate import TokenStream
from kvnotes.engine.hf import HFEngine
from kvnotes.errors import EngineError, OutOfCacheError
from kvnotes.fidelity import MECHANICAL_TOLERANCE
from kvnotes.plan import Splice, plan_compose
from kvnotes.prompt import PromptTokenizer
from kvnotes.segment import Buffer, KVCache, KVSegment
from kvnotes.session import Model

pytestmark = BEARTYPE_IN_STRATEGIES

TOLERANCE = MECHANICAL_TOLERANCE["float32"]

MIN_PIECE_TOKENS = execute.MIN_PIECE_TOKENS
"""As it is for users: the tests of this folder set it to 1."""

GREEDY = SamplingParams(6)
SEEDED = SamplingParams(6, temperature=1.2, top_k=40, top_p=0.95, seed=3)
HEADERS = ("You help.\n", "You help people who are in a hurry.\n", "You.\n")

ignore_warnings = pytest.mark.filterwarnings("ignore")  # of models, about kernels


# -- engines -------------------------------------------------------------------------------


@cache
def engine_for(name: str) -> HFEngine:
    return engine(name) if name.startswith("llama-") else engine_of(tiny_model_of(name))


def conversations(e: HFEngine, count: int) -> list[Execution]:
    """Prompts over one segment, behind headers of different lengths."""
    policy = e.compile(tokens(30, 1))
    found = []
    for i in range(count):
        ids = (*tokens(16 * (i % 3), i), *policy.run.token_ids, *tokens(4 + i, 50 + i))
        plan = plan_compose(ids, [Splice("policy", policy.run, 0, 30, 16 * (i % 3))])
        found.append(e.execute(plan, segments=[policy]))
    return found


def run_together(streams: Sequence[Any], close: dict[int, int] | None = None) -> None:
    """Run streams at once; some are closed after so many tokens."""
    e = streams[0].engine
    for index, _ in e.together(streams):
        if len(streams[index].token_ids) == (close or {}).get(index):
            streams[index].close()


@ignore_warnings
@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-yarn", "gemma3n_text", "gpt_oss", "gemma2", "deepseek_v3"]
)
def test_streams_that_run_together_have_the_tokens_and_caches_of_those_alone(name: str) -> None:
    e = engine_for(name)
    params = [SamplingParams(4 + i, temperature=float(i % 2), seed=i) for i in range(4)]
    alone = [e.generate(s, p) for s, p in zip(conversations(e, 4), params, strict=True)]
    expected = [list(stream) for stream in alone]
    streams = [e.generate(s, p) for s, p in zip(conversations(e, 4), params, strict=True)]
    run_together(streams)
    assert [list(stream.token_ids) for stream in streams] == expected
    assert [len(ids) for ids in expected] == [4, 5, 6, 7]
    for ours, theirs in zip(streams, alone, strict=True):
        assert ours.cache.token_ids == theirs.cache.token_ids
        assert ours.cache.canonical_layout == theirs.cache.canonical_layout
        assert kv_gap(snapshot(ours.cache), snapshot(theirs.cache)) < 2 * TOLERANCE


def test_a_pass_has_a_token_of_each_and_reads_what_they_share_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    e = engine()
    widths: list[int] = []
    step = hf.HFEngine.step

    def counting(self: HFEngine, rows: Sequence[Fed]) -> Any:
        widths.append(len(rows))
        return step(self, rows)

    monkeypatch.setattr(hf.HFEngine, "step", counting)
    streams = [e.generate(s, SamplingParams(3 + i)) for i, s in enumerate(conversations(e, 3))]
    run_together(streams)
    assert widths == [3, 3, 2, 1], "the first tokens come from the prompts"


def test_a_stream_closed_in_the_middle_leaves_the_others_as_they_are() -> None:
    e = engine()
    expected = [list(e.generate(s, GREEDY)) for s in conversations(e, 4)]
    streams = [e.generate(s, GREEDY) for s in conversations(e, 4)]
    run_together(streams, close={1: 2, 0: 3, 3: 1})
    lengths = (3, 2, 6, 1)
    for stream, ids, length in zip(streams, expected, lengths, strict=True):
        assert list(stream.token_ids) == ids[:length]
        assert stream.cache.length == stream._start.cache.length + max(length - 1, 0)  # type: ignore[attr-defined]


def test_a_stop_token_ends_its_own_stream_alone() -> None:
    e = engine()
    expected = [list(e.generate(s, GREEDY)) for s in conversations(e, 3)]
    stop = frozenset({expected[1][2]})
    streams = [e.generate(s, GREEDY, stop) for s in conversations(e, 3)]
    run_together(streams)
    for stream, ids in zip(streams, expected, strict=True):
        cut = next((i + 1 for i, token in enumerate(ids) if token in stop), len(ids))
        assert list(stream.token_ids) == ids[:cut]


def test_streams_of_forks_of_one_cache_never_see_each_other() -> None:
    e = engine()
    (start,) = conversations(e, 1)
    starts = [Execution(start.cache.fork(), start.logits, 0.0) for _ in range(3)]
    params = [SamplingParams(6, temperature=1.5, seed=seed) for seed in range(3)]
    expected = [list(e.generate(start, p)) for p in params]
    streams = [e.generate(s, p) for s, p in zip(starts, params, strict=True)]
    run_together(streams)
    assert [list(stream.token_ids) for stream in streams] == expected
    assert len({id(stream.cache.buffer) for stream in streams}) == 3
    for stream, one in zip(streams, params, strict=True):
        alone = e.generate(start, one)
        assert list(alone) == list(stream.token_ids)
        assert kv_gap(snapshot(stream.cache), snapshot(alone.cache)) < 2 * TOLERANCE


def spliced(e: HFEngine, policy: KVSegment, num_before: int, num_behind: int) -> KVCache:
    """A prompt over a segment, with room behind it."""
    ids = (*tokens(num_before, 2), *policy.run.token_ids, *tokens(num_behind, 3))
    plan = plan_compose(ids, [Splice("policy", policy.run, 0, len(policy.run), num_before)])
    return e.room_for(e.execute(plan, segments=[policy]).cache, 4)


def check_step(e: HFEngine, caches: Sequence[KVCache]) -> None:
    """One pass over all gives each the logits of a pass of its own."""
    rows = [Fed(cache_, 0, 5, cache_.length) for cache_ in caches]
    alone = [e.step([row])[0] for row in rows]
    for ours, theirs in zip(e.step(rows), alone, strict=True):
        assert relative_gap(ours, theirs) <= TOLERANCE


@ignore_warnings
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_who_stands_past_the_window_takes_no_part_in_what_others_share(
    order: tuple[int, ...],
) -> None:
    e = engine_for("mistral")
    policy = e.compile(tokens(20, 1))
    alone = e.room_for(e.prefill(tokens(9, 7)).cache, 4)
    caches = [alone, spliced(e, policy, 4, 2), spliced(e, policy, 4, 30)]
    check_step(e, [caches[i] for i in order])


def test_conversations_over_two_segments_are_generated_in_any_order() -> None:
    e = engine()
    one, other = e.compile(tokens(20, 1)), e.compile(tokens(20, 4))
    check_step(e, [spliced(e, policy, 4, 3) for policy in (one, other, one, other, one)])


def test_a_stream_of_another_engine_is_refused() -> None:
    one, other = engine(), engine("llama-mha")
    streams = [e.generate(e.prefill(tokens(5)), GREEDY) for e in (one, other)]
    with pytest.raises(EngineError, match="of another engine"):
        one.together(streams)
    assert isinstance(streams[0], TokenStream) and streams[0].token_ids == ()


# -- sessions ------------------------------------------------------------------------------


def talk(model: Model, header: str, *asked: str, **options: Any) -> Session:
    """A header, a policy, then questions."""
    session = Session(
        model,
        messages=[
            {"role": "system", "content": header + "status: {{status}}\n"},
            {"role": "system", "segment": "policy"},
        ],
        fields={"status": "low"},
        segments={"policy": POLICY},
        splice="always",
        **options,
    )
    for text in asked:
        session.user(text)
    return session


def talks(model: Model | None = None) -> list[Session]:
    model = model or tiny_model()
    return [talk(model, header, f"hello {i}") for i, header in enumerate(HEADERS)]


def said(session: Session) -> str:
    last = session.messages[-1]
    assert last.role == "assistant"
    return last.content


def memory(sessions: Iterable[Session]) -> int:
    """Bytes that some conversations and what they were compiled from take."""
    found: dict[int, int] = {}
    for session in sessions:
        assert session._talk.live is not None
        cache_ = session._talk.live.cache
        holders: list[Any] = [cache_.buffer, *(piece.memory for piece in cache_.pieces)]
        holders += [segment.buffer or segment for segment in cache_.sources]
        found.update((id(holder), holder.nbytes) for holder in holders)
    return sum(found.values())


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_replies_are_those_that_each_session_gives_alone(params: SamplingParams) -> None:
    expected = [session.generate(params) for session in talks()]
    sessions = talks()
    turns = generate_together(sessions, params)
    assert [turn.text for turn in turns] == [turn.text for turn in expected]
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in expected]
    assert [turn.plan.shape for turn in turns] == [turn.plan.shape for turn in expected]
    assert {turn.op for turn in turns} == {"generate"}
    assert [said(session) for session in sessions] == [turn.text for turn in turns]
    shifts = {
        piece.shift
        for session in sessions
        for piece in session._talk.live.cache.pieces  # type: ignore[union-attr]
        if not isinstance(piece.memory, Buffer)
    }
    assert len(shifts) == len(HEADERS), "the policy stands behind headers of other lengths"
    for session in sessions:
        session.user("and now?")
        assert gap_to_mask(session) <= TOLERANCE


def test_each_session_has_its_own_limit_and_its_own_stop_strings() -> None:
    long = SamplingParams(12)
    texts = [session.generate(long).text for session in talks()]
    assert texts[1] is not None and len(texts[1]) > 4
    params = [SamplingParams(2), SamplingParams(12, stop=(texts[1][3:5],)), SamplingParams(9)]
    expected = [s.generate(p) for s, p in zip(talks(), params, strict=True)]
    sessions = talks()
    turns = generate_together(sessions, params)
    assert [turn.text for turn in turns] == [turn.text for turn in expected]
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in expected]
    assert turns[1].text == texts[1][: texts[1].index(texts[1][3:5])]
    assert len(turns[0].token_ids or ()) == 2 and len(turns[2].token_ids or ()) <= 9
    for session in sessions:
        session.user("and now?")
        assert gap_to_mask(session) <= TOLERANCE


def test_changes_that_wait_are_computed_first() -> None:
    def changed() -> list[Session]:
        sessions = talks()
        generate_together(sessions, GREEDY)
        for session in sessions[:2]:
            session.edit(status="high and more")
        sessions[2].user("and now?")
        return sessions

    expected = [session.generate(GREEDY).text for session in changed()]
    sessions = changed()
    assert [turn.text for turn in generate_together(sessions, GREEDY)] == expected
    assert all("high and more" in s.render().text for s in sessions[:2])


def test_one_session_and_forks_are_taken_as_well() -> None:
    (first, *_) = talks()
    text = first.fork().generate(GREEDY).text
    assert [turn.text for turn in generate_together([first.fork()], GREEDY)] == [text]
    forks = [first.fork(), first.fork(), first]
    assert [turn.text for turn in generate_together(forks, GREEDY)] == [text] * 3


@cache
def long_model() -> Model:
    """A model with room for a policy of 3,000 tokens."""
    config = LlamaConfig(
        vocab_size=len(family_tokenizer("smollm2")) + 5,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    made = HFEngine(LlamaForCausalLM(config).eval(), "long")
    return Model(made, PromptTokenizer(family_tokenizer("smollm2")), "long")


def test_sixteen_conversations_over_one_policy_take_little_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute, "MIN_PIECE_TOKENS", MIN_PIECE_TOKENS)
    policy = "Never sell below the price. " * 700
    sessions = [
        Session(
            long_model(),
            messages=[
                {"role": "system", "content": "You help. " * (1 + i % 3)},
                {"role": "system", "segment": "policy"},
                {"role": "user", "content": f"hello {i}"},
            ],
            segments={"policy": policy},
            splice="always",
        )
        for i in range(16)
    ]
    num_tokens = generate_together(sessions, SamplingParams(4))[0].plan.tokens.total
    gc.collect()
    assert num_tokens > 4000
    assert memory(sessions) < 1.3 * memory(sessions[:1])


# -- what is refused, and what fails -------------------------------------------------------


def test_what_cannot_be_generated_together_is_refused() -> None:
    sessions = talks()
    with pytest.raises(EngineError, match="no sessions are given"):
        generate_together([])
    with pytest.raises(EngineError, match="3 sessions are given, one of them more than once"):
        generate_together([sessions[0], sessions[1], sessions[0]])
    with pytest.raises(EngineError, match="of different loaded models"):
        generate_together([sessions[0], talk(tiny_model("llama3"), HEADERS[0], "hello")])
    with pytest.raises(EngineError, match="3 sessions and 2 parameters are given"):
        generate_together(sessions, [GREEDY] * 2)
    assert [len(session.messages) for session in sessions] == [3, 3, 3]
    assert all(session.num_cached_tokens == 0 for session in sessions)


def test_a_session_with_an_open_stream_is_refused_and_the_others_are_as_they_were() -> None:
    sessions = talks()
    expected = [session.fork().generate(GREEDY).text for session in sessions]
    stream = sessions[2].stream(GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="still open"):
        generate_together(sessions, GREEDY)
    stream.close()
    assert [len(session.messages) for session in sessions] == [3, 3, 4]
    assert [turn.text for turn in generate_together(sessions[:2], GREEDY)] == expected[:2]


def check_as_before(sessions: list[Session], expected: list[str | None]) -> None:
    """Nothing was said; waiting changes still wait; the next reply is the right one."""
    assert [len(session.messages) for session in sessions] == [5, 5, 5]
    turns = generate_together(sessions, GREEDY)
    assert [turn.text for turn in turns] == expected
    for session in sessions:
        session.user("and now?")
        assert gap_to_mask(session) <= TOLERANCE


def waiting() -> list[Session]:
    """Sessions with something in their caches and something that waits."""
    sessions = talks()
    generate_together(sessions, GREEDY)
    for session in sessions:
        session.user("and then?")
        session.edit(status="high")
    return sessions


def test_a_pass_that_fails_leaves_all_sessions_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [session.generate(GREEDY).text for session in waiting()]
    sessions = waiting()
    step, count = hf.HFEngine.step, 0

    def failing(self: HFEngine, rows: Sequence[Fed]) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("no memory")
        return step(self, rows)

    with monkeypatch.context() as patched:
        patched.setattr(hf.HFEngine, "step", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            generate_together(sessions, GREEDY)
    check_as_before(sessions, expected)


def test_a_session_that_fails_to_begin_leaves_the_others_as_they_were() -> None:
    expected = [session.generate(GREEDY).text for session in waiting()]
    sessions = waiting()
    with pytest.raises(OutOfCacheError):
        generate_together(sessions, [GREEDY, GREEDY, SamplingParams(5000)])
    check_as_before(sessions, expected)


# -- at random -----------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.sampled_from(["together", "together", "edit", "user", "alone", "new"]),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    min_size=2,
    max_size=6,
)


@laws(3)
@given(doing=actions, temperature=st.sampled_from([0.0, 1.3]))
def test_after_any_turns_each_session_is_what_a_new_one_would_be(
    doing: list[tuple[str, int, int]], temperature: float
) -> None:
    model = tiny_model()
    sessions = [talk(model, HEADERS[0], "hello"), talk(model, HEADERS[1], "hi")]
    for number, (what, which, size) in enumerate(doing):
        session = sessions[which % len(sessions)]
        params = SamplingParams(size, temperature=temperature, seed=number)
        if what == "together":
            chosen = sessions[: 1 + which]
            held = [[m.content for m in s.messages] for s in chosen]
            turns = generate_together(chosen, params)
            for one, before, turn in zip(chosen, held, turns, strict=True):
                assert [m.content for m in one.messages] == [*before, turn.text]
        elif what == "alone":
            session.generate(params)
        elif what == "edit":
            session.edit({"status": "high " * size}, strategy="suffix")
        elif what == "user":
            session.user("and now? " * size)
        elif len(sessions) < 4:
            sessions.append(talk(model, HEADERS[which % 3], "hello"))
    for session in sessions:
        session.user("and then?")
        assert gap_to_mask(session) <= TOLERANCE
        new = rebuilt(session, splice="always")
        assert new.generate(GREEDY).text == session.generate(GREEDY).text
