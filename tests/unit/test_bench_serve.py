"""`kvnotes bench serve` on a server that only looks like vLLM: arms, load, counts, failures."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from helpers_prompt import prompt_tokenizer
from helpers_vllm_server import FakeVLLM

from kvnotes.bench.serve import ServeOptions, Target, run
from kvnotes.bench.serve.load import (
    Address,
    Drive,
    Record,
    Tally,
    Timed,
    arrivals,
    drive,
    percentile,
)
from kvnotes.bench.serve.prompts import (
    MIN_QUESTION_TOKENS,
    OLD,
    REFERENCE,
    Arm,
    Prompt,
    Prompts,
    ceiling,
    common_prefix,
    fork_of,
    make_ask,
    plugin_arms,
    stock_arms,
)
from kvnotes.bench.serve.server import ServerClient, counters
from kvnotes.bench.text import long_text
from kvnotes.bench.timing import Probe
from kvnotes.errors import EngineError, PlanError, SpecMismatchError
from kvnotes.prompt import PromptTokenizer

LENGTH = 600
PLACES = (0, 25, 50, 75, 95)
ARMS = {arm.name: arm for arm in (*stock_arms(PLACES), *plugin_arms())}
OPTIONS = ServeOptions(
    lengths=(LENGTH,), rates=(50.0,), requests=4, blocks=2, output_tokens=3, places=(0, 50)
)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "busy", lambda self: False)


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return prompt_tokenizer("smollm2")


@pytest.fixture(scope="module")
def text(tokenizer: PromptTokenizer) -> str:
    return long_text(tokenizer, [], LENGTH + 100)


@pytest.fixture(scope="module")
def prompts(tokenizer: PromptTokenizer, text: str) -> Prompts:
    return Prompts(tokenizer, text, LENGTH)


def made(prompts: Prompts, name: str, number: int = 6) -> list[Prompt]:
    return [prompts.prompt(ARMS[name], make_ask(i)) for i in range(number)]


def shown(tokenizer: PromptTokenizer, prompt: Prompt) -> str:
    return tokenizer.decode(prompt.token_ids)


# -- questions and arms --------------------------------------------------------------------------


def test_every_question_and_value_is_another_one_and_long_enough(
    prompts: Prompts, tokenizer: PromptTokenizer
) -> None:
    asks = [make_ask(i) for i in range(400)]
    assert len({ask.value for ask in asks}) == len({ask.question for ask in asks}) == 400
    assert all(prompts.question_tokens(ask) >= MIN_QUESTION_TOKENS for ask in asks)
    assert all(ask.value != OLD and ask.value.split()[0] != OLD.split()[0] for ask in asks)
    assert make_ask(7) == make_ask(7)
    for kind in ("status", "rule"):
        some = [ask for ask in asks if ask.kind == kind]
        assert len({ask.right for ask in some}) > 1, "one answer is right everywhere"


def test_answers_part_behind_what_they_have_in_common(tokenizer: PromptTokenizer) -> None:
    for ask in (make_ask(0), make_ask(1)):
        fork = fork_of(tokenizer, ask)
        assert len(set(fork.choices)) == len(ask.choices)
        for token, choice in zip(fork.choices, ask.choices, strict=True):
            said = tokenizer.decode([*fork.token_ids, token])
            assert f"{ask.cue} {choice}".startswith(said.replace('"', ""))
    alike = replace(make_ask(1), choices=("yes", "yes"))
    with pytest.raises(PlanError, match="two of the answers yes, yes begin alike"):
        fork_of(tokenizer, alike)


def test_the_right_answer_follows_from_the_value() -> None:
    for ask in map(make_ask, range(200)):
        status = ask.value.split()[0]
        if ask.kind == "status":
            assert ask.choices[ask.right] == status
        else:
            needed = "delivered" if "returned" in ask.question else "pending"
            assert (ask.choices[ask.right] == "yes") == (status == needed)


@pytest.mark.parametrize(
    ("name", "old", "new", "share"),
    [
        ("prefix, 0 %", False, True, (0.05, 0.15)),
        ("prefix, 25 %", False, True, (0.2, 0.4)),
        ("prefix, 50 %", False, True, (0.4, 0.6)),
        ("prefix, 75 %", False, True, (0.6, 0.8)),
        ("prefix, 95 %", False, True, (0.75, 0.9)),
        ("hoist", False, True, (0.8, 0.9)),
        ("late system", False, True, (0.8, 0.9)),
        ("erratum", True, True, (0.75, 0.9)),
        ("no change", True, False, (0.75, 0.95)),
        ("splice", False, True, (0.05, 0.15)),
        ("refresh+erratum", False, True, (0.05, 0.15)),
    ],
)
def test_an_arm_shows_its_value_at_its_place_and_shares_what_stands_before(
    name: str,
    old: bool,
    new: bool,
    share: tuple[float, float],
    prompts: Prompts,
    tokenizer: PromptTokenizer,
) -> None:
    asks, given = [make_ask(i) for i in range(6)], made(prompts, name)
    for ask, prompt in zip(asks, given, strict=True):
        said = shown(tokenizer, prompt)
        assert (OLD in said) == old
        assert (ask.value in said) == new
        assert said.count(ask.value) == (2 if name == "refresh+erratum" else int(new))
        assert ask.question in said
    common = common_prefix(given)
    assert all(p.token_ids[: len(common)] == common for p in given)
    assert len({p.token_ids[len(common)] for p in given}) > 1
    assert share[0] < len(common) / len(given[0].token_ids) < share[1]


def test_the_erratum_stands_between_the_policy_and_the_question(
    prompts: Prompts, tokenizer: PromptTokenizer
) -> None:
    ask, prompt = make_ask(0), made(prompts, "erratum", 1)[0]
    behind = tokenizer.decode(prompt.token_ids[prompt.stop :])
    assert behind.index("[STATE UPDATE]") < behind.index(ask.value) < behind.index(ask.question)
    without = made(prompts, "no change", 1)[0]
    assert prompt.token_ids[: prompt.stop] == without.token_ids[: without.stop]


def test_the_policy_of_spliced_arms_has_the_same_tokens_everywhere(prompts: Prompts) -> None:
    behind = prompts.behind_old()
    policy = behind.token_ids[behind.start :]
    assert behind.stop == len(behind.token_ids)
    for name in ("splice", "refresh+erratum", "prefix, 0 %", "erratum"):
        for prompt in made(prompts, name, 3):
            assert prompt.token_ids[prompt.start : prompt.stop] == policy


def test_a_policy_longer_than_its_text_is_refused(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(PlanError, match=r"policy of 900 tokens is asked for, the text has \d+"):
        Prompts(tokenizer, "Just this.", 900)


# -- ceilings ------------------------------------------------------------------------------------


def num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    number = min(len(left), len(right))
    return next((i for i in range(number) if left[i] != right[i]), number)


def by_hand(prompts: list[Prompt], primed: tuple[int, ...], block: int) -> int:
    """Whole blocks of the longest prefix shared with anything before."""
    before, found = [primed], 0
    for prompt in prompts:
        ids = prompt.token_ids
        best = 0
        for other in before:
            best = max(best, num_common(ids, other))
        found += min(best, len(ids) - 1) // block * block
        before.append(ids)
    return found


@pytest.mark.parametrize("block", [1, 16, 32, 128])
@pytest.mark.parametrize("name", ["prefix, 0 %", "prefix, 50 %", "hoist", "erratum", "no change"])
def test_the_ceiling_is_the_longest_prefix_in_whole_blocks(
    name: str, block: int, prompts: Prompts
) -> None:
    given = made(prompts, name)
    primed = common_prefix(given)
    best = ceiling(ARMS[name], given, [primed], block)
    assert best.cached == by_hand(given, primed, block)
    assert best.loaded == 0 and best.total == sum(len(p.token_ids) for p in given)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    prompt = Prompt(tuple(range(64)), 0, 0)
    assert ceiling(REFERENCE, [prompt], [prompt.token_ids], 32).cached == 32


def test_the_ceiling_of_a_splice_is_its_segment_without_the_seam(prompts: Prompts) -> None:
    given = made(prompts, "splice")
    size = given[0].stop - given[0].start
    for seam in (0, 1, 16):
        best = ceiling(replace(ARMS["splice"], num_seam_tokens=seam), given, [], 32)
        assert best.loaded == len(given) * (size - seam)
    warmed = ceiling(ARMS["splice"], given[1:], [given[0].token_ids], 16)
    assert 0 < warmed.cached <= len(given) * given[0].start
    assert warmed.loaded == (len(given) - 1) * (size - 1)


# -- load ----------------------------------------------------------------------------------------


def test_arrivals_are_the_same_for_a_seed_and_as_frequent_as_asked() -> None:
    times = arrivals(4000, 2.0, "0/7000/2.0/0")
    assert times == arrivals(4000, 2.0, "0/7000/2.0/0") != arrivals(4000, 2.0, "0/7000/2.0/1")
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert 0.45 < mean < 0.55 and 0.9 < spread / mean < 1.1, "gaps of a Poisson process"
    assert arrivals(3, None, "") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 5.0), (90, 9.0), (91, 10.0), (99, 10.0), (1, 1.0), (100, 10.0)]
)
def test_a_percentile_is_one_of_the_values(percent: int, value: float) -> None:
    values = [float(i) for i in range(1, 11)]
    random.Random(0).shuffle(values)
    assert percentile(values, percent) == value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


def test_goodput_counts_what_is_in_time_and_has_not_failed() -> None:
    tally = Tally()
    records = [
        Record(0.0, first=0.1, end=1.0, num_tokens=4),
        Record(0.0, first=0.5, end=1.0, num_tokens=4),
        Record(1.0, first=2.0, end=3.0, num_tokens=4),
        Record(1.0, first=0.1, end=0.2, error="cut"),
    ]
    tally.add(Drive(records, 4.0, 0.1))
    assert tally.goodput(500.0) == 2 / 4
    assert tally.goodput(499.0) == 1 / 4
    assert tally.ttft_ms(99) == 2000.0 and len(tally.done) == 3 and tally.errors == ["cut"]


@pytest.fixture
def fake(tokenizer: PromptTokenizer) -> FakeVLLM:
    return FakeVLLM(tokenizer.encode)


@pytest.fixture
def url(fake: FakeVLLM) -> Iterator[str]:
    with fake.running() as address:
        yield address


def timed(at: float, **more: Any) -> Timed:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, **more}
    return Timed(at, json.dumps(body).encode())


def test_times_count_from_when_a_request_should_have_been_sent(fake: FakeVLLM, url: str) -> None:
    fake.first_s = 0.2
    done = drive(Address(url), [timed(0.3), timed(0.0)], timeout_s=10.0)
    assert [r.at for r in done.records] == [0.3, 0.0]
    for record in done.records:
        assert record.first is not None and 0.2 <= record.first <= record.end
        assert record.num_tokens == 4 and record.text == " t0 t1 t2 t3" and not record.error
    assert done.wall_s >= 0.5
    assert fake.asked[0]["prompt"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("status", "HTTP 503: "),
        ("event", "the stream says "),
        ("cut", "the stream ended after 1 chunks without [DONE]"),
    ],
)
def test_a_request_that_fails_is_a_record_that_says_why(
    how: str, said: str, fake: FakeVLLM, url: str
) -> None:
    fake.fail = lambda body: how if body.get("tag") else ""
    done = drive(Address(url), [timed(0.0), timed(0.0, tag=1)], timeout_s=10.0)
    assert not done.records[0].error and done.records[1].error.startswith(said)


def test_a_server_that_is_gone_or_too_slow_is_a_failure_too(fake: FakeVLLM, url: str) -> None:
    gone = drive(Address("http://127.0.0.1:9"), [timed(0.0)], timeout_s=10.0)
    assert "ConnectionRefusedError" in gone.records[0].error
    fake.first_s = 1.0
    slow = drive(Address(url), [timed(0.0)], timeout_s=0.2)
    assert "timed out" in slow.records[0].error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="is no address of a server"):
        Address(url)


# -- the server ----------------------------------------------------------------------------------


def test_counters_are_summed_over_labels_and_read_in_any_form() -> None:
    text = (
        "# HELP a_total Help, with a_total 7\n"
        'a_total{engine="0",s="x y"} 3.0\na_total{engine="1"} 4\nb:c 1.5e+03\n'
    )
    assert counters(text) == {"a_total": 7.0, "b:c": 1500.0}


def test_a_server_of_another_tokenizer_is_refused(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer
) -> None:
    fake.encode = lambda text: (1, 2, 3)
    client = ServerClient(url, timeout_s=10.0)
    with pytest.raises(SpecMismatchError, match=r"tiny makes 3 tokens of a text, .* \d+ others"):
        client.check_tokenizer(tokenizer, "tiny")


def test_a_server_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(EngineError, match="got no answer"):
        ServerClient("http://127.0.0.1:9", timeout_s=1.0).facts()


# -- the whole -----------------------------------------------------------------------------------


def measured(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str, options: ServeOptions = OPTIONS
) -> dict[str, Any]:
    machine = {"dtype": "float32", "threads": 1, "model": "tiny"}
    target = Target(ServerClient(url, timeout_s=10.0), tokenizer, machine)
    result = run(target, text, options, lambda said: None)
    assert {p.title for p in result.panels} and all(p.series for p in result.panels)
    return {table.title: table for table in result.tables}


def percent(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def test_hits_meet_the_ceiling_on_a_server_that_forgets_nothing(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    tables = measured(fake, url, tokenizer, text)
    names = [f"{LENGTH}-token policy, 50/s", f"{LENGTH}-token policy, all at once"]
    assert [*tables][:2] == names
    slow, at_once = (tables[name].rows for name in names)
    assert "prefix, 50 %" not in {row["arm"] for row in slow}, "swept at saturation alone"
    assert {row["arm"] for row in at_once} == {
        "prefix, 0 %",
        "prefix, 50 %",
        "hoist",
        "late system",
        "erratum",
        "no change",
        "splice",
        "splice, EPIC 16",
        "refresh+erratum",
    }
    for row in (*slow, *at_once):
        assert row["reused"] == row["ceiling"], row["arm"]
        assert row["requests"] == 4 and row["failed"] == 0
        assert row["TTFT p50"] <= row["TTFT p90"] <= row["TTFT p99"] <= row["e2e p90"]
    by_arm = {row["arm"]: row for row in at_once}
    assert percent(by_arm["prefix, 0 %"]["hit"]) < percent(by_arm["prefix, 50 %"]["hit"])
    assert percent(by_arm["prefix, 50 %"]["hit"]) < percent(by_arm["erratum"]["hit"])
    assert percent(by_arm["splice"]["hit"]) < 15 < 70 < percent(by_arm["splice"]["reused"])
    assert all(row["foreign tokens"] == 0 for row in tables["the load generator"].rows)


def test_requests_of_an_arm_share_a_salt_and_no_prompt(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    measured(fake, url, tokenizer, text)
    streamed = [body for body in fake.asked if body.get("stream")]
    salts = {body["cache_salt"] for body in streamed}
    assert len(salts) == 9
    assert all(len(salt) <= 128 and not set("@/\\\0") & set(salt) for salt in salts)
    for salt in salts:
        asked = [tuple(body["prompt"]) for body in streamed if body["cache_salt"] == salt]
        assert len(set(asked)) == len(asked)
    params = {body["cache_salt"].split(" ", 2)[2]: body["kv_transfer_params"] for body in streamed}
    assert params["erratum"] == {"kvnotes": {"splice": False}}
    assert params["splice"]["kvnotes"]["num_seam_tokens"] == 1
    assert params["splice, EPIC 16"]["kvnotes"]["num_seam_tokens"] == 16
    assert params["refresh+erratum"]["kvnotes"]["values"] == {"order_status": OLD}


def test_without_the_plugin_its_arms_are_named_as_not_measured(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    fake.plugin = False
    tables = measured(fake, url, tokenizer, text)
    note = tables["against the value in the prefix"].note
    for name in ("splice", "splice, EPIC 16", "refresh+erratum"):
        assert f"Not measured: {name}, the server does not run the plug-in" in note
    assert all("kv_transfer_params" not in body for body in fake.asked)


def test_failures_are_counted_and_not_hidden(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    fake.fail = lambda body: "event" if body["cache_salt"].endswith("erratum") else ""
    tables = measured(fake, url, tokenizer, text)
    table = tables[f"{LENGTH}-token policy, all at once"]
    rows = {row["arm"]: row for row in table.rows}
    assert rows["erratum"]["failed"] == 4 and rows["erratum"]["TTFT p50"] is None
    assert rows["erratum"]["req/s"] == rows["erratum"]["good/s"] == 0
    assert rows["hoist"]["failed"] == 0
    assert "Failures: the stream says" in table.note and "engine died" in table.note
    ratios = {row["arm"]: row for row in tables["against the value in the prefix"].rows}
    assert ratios["erratum"]["prefix TTFT p90 / its"] is None


def test_decisions_are_judged_by_the_clean_prefill(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    """The server reads the last value in a prompt."""

    def choose(ids: list[int], choices: list[int]) -> list[float]:
        said = tokenizer.decode(ids)
        words = [tokenizer.decode([i]).strip() for i in choices]
        values = ("pending since", "delivered since", "cancelled since", "shipped since")
        value = max(values, key=said.rfind)
        if len(choices) == 2:
            needed = "delivered since" if "returned now" in said else "pending since"
            return [-0.1, -3.0] if value == needed else [-3.0, -0.1]
        return [-0.1 if value.startswith(word) else -3.0 for word in words]

    fake.choose = choose
    rows = {row["arm"]: row for row in measured(fake, url, tokenizer, text)["decisions"].rows}
    for name in ("prefix, 0 %", "prefix, 50 %", "erratum", "splice", "hoist"):
        assert rows[name]["agrees"] == "4 / 4" and rows[name]["gap"] == 0
        assert rows[name]["right, status"] == "2 / 2"
    assert rows["erratum"]["recovery"] == "1.00 [1.00, 1.00]"
    assert rows["no change"]["recovery"] == "0.00 [0.00, 0.00]"
    assert rows["no change"]["right, status"] == "0 / 2" and rows["no change"]["gap"] > 1
    assert rows["no change"]["agrees"] != "4 / 4"


def test_a_server_that_gives_no_log_probabilities_is_measured_without_decisions(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    fake.choose = lambda ids, choices: [-0.1] * (len(choices) - 1)
    tables = measured(fake, url, tokenizer, text)
    assert "decisions" not in tables and f"{LENGTH}-token policy, all at once" in tables
    note = tables["against the value in the prefix"].note
    assert "Not measured: decisions, the server says nothing about 1 of 4 tokens" in note


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_measured(
    fake: FakeVLLM, url: str, tokenizer: PromptTokenizer, text: str
) -> None:
    fake.max_model_len = LENGTH
    with pytest.raises(PlanError, match=rf"have \d+ tokens, the server takes {LENGTH}"):
        measured(fake, url, tokenizer, text)
    assert not [body for body in fake.asked if body.get("stream")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"requests": 2, "blocks": 3}, "2 requests cannot be cut into 3 blocks"),
        ({"places": (0, 100)}, "in percent of the policy before it"),
        ({"rates": (1.0, 0.0)}, "requests per second"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ServeOptions(**given)


def test_an_arm_is_swept_at_saturation_alone_if_it_only_tells_the_place() -> None:
    assert [arm.name for arm in stock_arms((50, 0, 50)) if arm.swept] == ["prefix, 50 %"]
    assert not Arm("x", "erratum").swept
