"""Every model type that transformers can build small: exact, or refused with a cause.

`make test` runs a sample. The whole matrix, which also checks that docs/models.md says what
it finds, runs with KVNOTES_MATRIX=all; `python tests/helpers_models_page.py docs/models.md` writes
the page.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers
from helpers_matrix import causal_types
from helpers_models_page import EXACT, NOT_SMALL, Result, measure, read_page

from kvnotes.gate import CONTROL_FACTOR

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
WHOLE = os.environ.get("KVNOTES_MATRIX") == "all"
MIN_EXACT = 100
"""Model types that are exact under transformers 5.24."""

SAMPLE = (
    "afmoe",  # no positions on some layers, gated attention
    "beam",  # drifts with the position
    "codegen",  # an old-style table
    "cohere2",  # interleaved pairs, a window on some layers, no positions on others
    "deepseek_v2",  # latent, complex tables
    "deepseek_v3",  # latent
    "deepseek_v32",  # latent, with an indexer
    "doge",
    "gemma3_text",  # a table for each type of layer
    "gemma3n_text",  # layers that read the K/V of others
    "gemma4_text",
    "glm4",  # interleaved, partial
    "gpt2",
    "gpt_oss",  # attention sinks
    "hunyuan_v1_dense",  # norm weights after the rotation
    "hy_v4",  # an indexer on some layers, its rotated part at the end
    "inkling_text",
    "lfm2",
    "llama4_text",  # chunks
    "mamba",
    "mixtral",
    "modernbert-decoder",
    "mpt",
    "nanochat",  # turns the other way
    "olmo3",
    "phi",  # partial
    "qwen3_moe",
    "smollm3",
    "vaultgemma",  # soft-capped scores
)

TYPES = causal_types()
CHOSEN = TYPES if WHOLE else [name for name in SAMPLE if name in TYPES]

on_5_24 = pytest.mark.skipif(
    not transformers.__version__.startswith("5.24."), reason="the page is about one version"
)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {}


@pytest.mark.filterwarnings("ignore")  # of the models, about kernels they would rather have
@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_type_is_exact_or_refused_with_a_cause(
    name: str, results: dict[str, Result]
) -> None:
    found = results[name] = measure(name)
    assert found.verdict != "wrong", found
    if found.verdict == EXACT:
        assert found.error is not None and found.error <= 1e-5
        # a splice that is not rotated must be seen to be wrong
        assert found.control is None or found.control > CONTROL_FACTOR * found.error
    elif found.verdict != NOT_SMALL:
        assert found.cause and "Error" not in found.cause.split(":")[0]


@on_5_24
@pytest.mark.parametrize("name", CHOSEN)
def test_the_page_says_what_is_measured(name: str, results: dict[str, Result]) -> None:
    if name not in results:
        pytest.fail(f"{name} was not measured")
    row = read_page(PAGE)[name]
    assert row.verdict == results[name].verdict
    assert row.layout == results[name].layout


@on_5_24
def test_the_page_has_every_model_type_and_enough_exact_ones() -> None:
    page = read_page(PAGE)
    assert set(page) == set(TYPES)
    assert sum(row.verdict == EXACT for row in page.values()) >= MIN_EXACT
