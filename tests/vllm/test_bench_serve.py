"""`kvnotes bench serve` starts a server, measures it, and ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_prompt import family_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvnotes.bench.timing import Probe
from kvnotes.cli.main import main
from kvnotes.vllm import launch

LENGTH = 200
HIT_POINTS = 0.01
"""Percent: hits are counted in tokens, and must be exactly what is possible."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer and a chat template."""
    made = tmp_path_factory.mktemp("model")
    tokenizer = family_tokenizer("smollm2")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).eval().save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def test_every_arm_is_measured_and_hits_what_is_possible(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # of the other tests of this folder
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Probe, "busy", lambda self: False)
    servers: list[launch.Server] = []
    start = launch.Server.start

    def started(self: launch.Server) -> None:
        servers.append(self)
        start(self)

    monkeypatch.setattr(launch.Server, "start", started)
    words = f"bench serve --model {folder} --lengths {LENGTH} --rates 20 --requests 4 --output 3"
    words += f" --places 0,50 --cache 1 --out {tmp_path} --json --quiet"
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert not stopped.value.code, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    tables = {table["title"]: table for table in result["tables"]}
    rows = tables[f"{LENGTH}-token policy, all at once"]["rows"]
    assert {row["arm"] for row in rows} == {
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
    for row in rows:
        assert row["requests"] == 4 and not row["failed"], row
        reused, best = (float(row[name].removesuffix(" %")) for name in ("reused", "ceiling"))
        assert abs(reused - best) <= HIT_POINTS, row
        assert 0 < row["TTFT p50"] <= row["e2e p50"]
    assert float({r["arm"]: r for r in rows}["splice"]["hit"].removesuffix(" %")) < 20
    decisions = {row["arm"]: row for row in tables["decisions"]["rows"]}
    assert decisions["prefix, 0 %"]["agrees"] == "4 / 4"
    assert decisions["no change"]["gap"] > 0
    assert all(r["foreign tokens"] == 0 for r in tables["the load generator"]["rows"])
    assert result["machine"]["vllm"] and result["machine"]["plugin"]
    assert len(servers) == 1 and not servers[0].answers()
