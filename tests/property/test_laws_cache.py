"""Law 10 and the rules of memory: random operations on caches that live side by side."""

from __future__ import annotations

import pytest
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from helpers_world import World
from hypothesis import given
from hypothesis import strategies as st

pytestmark = BEARTYPE_IN_STRATEGIES

EDITS = ("edit", "refresh", "append")
OTHERS = ("compose", "compile", "truncate", "fork", "drop", "generate", "score")


@laws(40)
@given(data=st.data())
def test_every_spliced_or_edited_cache_equals_its_mask_reference(data: st.DataObject) -> None:
    world = World(data)
    world.compile()
    world.compose()
    for _ in range(data.draw(st.integers(1, 4), label="edits")):
        getattr(world, data.draw(st.sampled_from(EDITS)))()


@pytest.mark.parametrize("name", ["qwen2-bias", "qwen3-qknorm", "llama-yarn", "llama-llama3"])
@laws(8)
@given(data=st.data())
def test_edits_equal_their_mask_reference_on_other_models(name: str, data: st.DataObject) -> None:
    world = World(data, name)
    world.compile()
    world.compose()
    for _ in range(2):
        getattr(world, data.draw(st.sampled_from(EDITS)))()


@laws(60)
@given(data=st.data())
def test_no_operation_touches_a_cache_that_somebody_else_uses(data: st.DataObject) -> None:
    world = World(data)
    world.compile()
    world.compose()
    for _ in range(data.draw(st.integers(2, 9), label="operations")):
        getattr(world, data.draw(st.sampled_from((*EDITS, *EDITS, *OTHERS)), label="do"))()
        world.check()
