"""One model has one fingerprint under every transformers: segments are found by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from helpers_matrix import tiny_model
from helpers_models import engine_of

ROOT = Path(__file__).resolve().parents[2]
OTHER = ROOT / ".venv" / "bin" / "python"

TYPES = (
    "codegen",  # a table that modules hold as one tensor, in one version
    "cohere2",
    "deepseek_v2",  # complex tables
    "deepseek_v32",
    "gemma3_text",  # a table for each type of layer
    "gemma3n_text",  # layers that keep nothing, which one version does not count
    "glm4",  # partial: the factor has another place
    "gpt_oss",
    "gptj",
    "llama4_text",
    "nanochat",
    "phi",
    "qwen3_moe",
)

SCRIPT = """
import json, sys, warnings
sys.path[:0] = [{root!r}, {tests!r}]
warnings.simplefilter("ignore")
from helpers_matrix import tiny_model
from helpers_models import engine_of
print(json.dumps({{name: engine_of(tiny_model(name)).identity._facts() for name in {types!r}}}))
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    not transformers.__version__.startswith("5.19."), reason="compares with the other version"
)
def test_every_version_finds_the_same(tmp_path: Path) -> None:
    script = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests"), types=TYPES)
    command = [str(OTHER), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name in TYPES:
        ours = json.loads(json.dumps(engine_of(tiny_model(name)).identity._facts()))
        assert ours == theirs[name], name
    assert sys.executable != str(OTHER)
