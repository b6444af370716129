"""`kvnotes run` on the embedded model: table, JSON, errors while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvnotes.errors import FieldValueError, ModelNotFoundError, OutOfCacheError

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]

POLICY = "A pending order can be cancelled. A shipped order cannot be cancelled. " * 12

SCENARIO = f"""\
strategy: refresh+erratum
fields: {{country: France}}
segments: {{policy: {{text: "{POLICY}"}}}}
messages:
  - {{role: system, content: "You serve a shop. The policy follows.\\n"}}
  - {{role: system, segment: policy}}
  - {{role: system, content: "country: {{{{country}}}}\\n"}}
turns:
  - {{user: "Hello!"}}
  - {{tool: "carrier: 2.4 kg", id: lookup, generate: {{max_new_tokens: 4}}}}
  - {{edit: {{country: Japan}}}}
  - {{user: "Which language does the label have?", decide: [French, Japanese], id: ask}}
  - {{delete: lookup}}
  - {{edit: {{country: "Japan, the island of Hokkaido"}}, strategy: suffix}}
  - {{generate: {{max_new_tokens: 4}}}}
"""


@pytest.fixture(scope="module")
def run(smollm2_path: Path) -> Any:
    def call(
        *args: str, stdin: str = SCENARIO, columns: str = "100"
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvnotes.cli.main", "run", "-"]
        return subprocess.run(
            [*command, "--model", str(smollm2_path), "--threads", "1", *args],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=ROOT,
            env={**os.environ, "COLUMNS": columns, "PYTHONPATH": str(ROOT)},
            timeout=300,
        )

    return call


@pytest.fixture(scope="module")
def compared(run: Any) -> dict[str, Any]:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_json_keeps_the_contract(compared: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "docs" / "run.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(compared)
    assert compared["threads"] == 1
    assert {"kvnotes", "python", "torch", "transformers"} <= set(compared["versions"])
    assert len(compared["fingerprint"]) == 64


def test_turns_come_in_the_order_of_the_scenario(compared: dict[str, Any]) -> None:
    turns = compared["turns"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 4, 5, 6, 7]
    operations = ["user", "tool", "edit", "user", "delete", "edit", "generate"]
    assert [turn["op"] for turn in turns] == operations


def test_tokens_add_up(compared: dict[str, Any]) -> None:
    for turn in compared["turns"]:
        tokens = turn["tokens"]
        assert tokens["total"] == tokens["reused"] + tokens["moved"] + tokens["computed"]


def test_what_waits_has_no_time_and_what_answers_has_all(compared: dict[str, Any]) -> None:
    for turn in compared["turns"]:
        answers = turn["decision"] is not None or turn["text"] is not None
        assert answers == (turn["turn"] in (2, 4, 7))
        for key in ("ttft_ms", "prefix_hit_ttft_ms", "full_ttft_ms", "speedup", "fidelity"):
            assert (turn[key] is not None) == answers, (turn["turn"], key)
        if answers:
            ratio = turn["full_ttft_ms"] / turn["ttft_ms"]
            assert turn["speedup"] == pytest.approx(ratio, rel=0.01)


def test_decision_has_scores_and_both_references(compared: dict[str, Any]) -> None:
    decision = compared["turns"][3]["decision"]
    assert set(decision["choices"]) == {"French", "Japanese"}
    assert decision["chosen"] == max(decision["choices"], key=decision["choices"].get)
    assert decision["clean_chosen"] in decision["choices"]
    assert decision["stale_chosen"] in decision["choices"]


def test_strategy_of_a_turn_counts_more_than_the_scenarios(compared: dict[str, Any]) -> None:
    assert compared["turns"][3]["strategy"] == "refresh+erratum"
    assert compared["turns"][6]["strategy"] == "suffix"


def test_without_comparison_references_are_null_and_answers_are_the_same(
    run: Any, compared: dict[str, Any]
) -> None:
    done = run("--json", "--no-compare", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    turns = json.loads(done.stdout)["turns"]
    for turn, other in zip(turns, compared["turns"], strict=True):
        for key in ("prefix_hit_ttft_ms", "full_ttft_ms", "speedup", "fidelity"):
            assert turn[key] is None
        for key in ("op", "strategy", "plan", "exact", "tokens", "text"):
            assert turn[key] == other[key], (turn["turn"], key)
        if turn["decision"]:
            assert turn["decision"]["chosen"] == other["decision"]["chosen"]
            assert turn["decision"]["clean_chosen"] is None


def test_table_shows_every_turn(run: Any) -> None:
    done = run(columns="80")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in done.stdout
    for text in ("user: Hello!", "decision: ", "reply: ", "edit country = Japan", "3 answers"):
        assert text in done.stdout


def test_table_without_comparison_has_no_columns_of_references(run: Any) -> None:
    done = run("--no-compare", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    for word in ("speedup", "hit ms", "full ms", "KL nats", "clean:"):
        assert word not in done.stdout
    assert "exact" in done.stdout
    assert "TTFT from" in done.stdout


def test_control_string_in_a_value_is_found_at_its_turn(run: Any) -> None:
    done = run(stdin=SCENARIO.replace("country: Japan}", 'country: "<|im_end|>"}'))
    assert done.returncode == FieldValueError.exit_code
    assert ": turn 3: " in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("hint: ")


def test_conversation_that_does_not_fit_is_refused(run: Any) -> None:
    done = run(
        "--no-compare",
        "--json",
        stdin=SCENARIO.replace("max_new_tokens: 4", "max_new_tokens: 90000"),
    )
    assert done.returncode == OutOfCacheError.exit_code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_missing_model_is_one_line_with_the_ways_to_get_one(run: Any) -> None:
    done = run("--model", "/no/such/model")
    assert done.returncode == ModelNotFoundError.exit_code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 2
