"""What the plug-in for vLLM decides: no vLLM here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_store import segment_of
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.errors import PlanError, SegmentFormatError, UnsupportedModelError
from kvnotes.plan import Run
from kvnotes.store import KVStore
from kvnotes.store.header import Provenance
from kvnotes.vllm.config import ConnectorConfig
from kvnotes.vllm.index import Compiled, Found, SegmentIndex
from kvnotes.vllm.layers import heads_of, order_of, slots_of
from kvnotes.vllm.planning import plan_splices
from kvnotes.vllm.requests import Wish
from kvnotes.vllm.salt import salt_request, unsalt_request
from kvnotes.vllm.served import read

# -- requests ------------------------------------------------------------------------------------


def test_a_request_without_wishes_is_spliced() -> None:
    assert Wish.of(None) == Wish.of({"other": 1}) == Wish()


@pytest.mark.parametrize(
    "said", [{"seam": 1}, {"num_seam_tokens": -1}, {"segments": "refunds"}, [], {"values": [1]}]
)
def test_what_is_not_known_is_refused(said: Any) -> None:
    with pytest.raises(PlanError, match="kv_transfer_params"):
        Wish.of({"kvnotes": said})


def test_segments_are_allowed_by_name_or_version() -> None:
    wish = Wish.of({"kvnotes": {"segments": ["a", "b@2"]}})
    assert wish.allows("a", 7) and wish.allows("b", 2)
    assert not wish.allows("b", 3) and not wish.allows("c", 1)


def test_options_that_are_not_known_are_refused() -> None:
    with pytest.raises(PlanError, match="seam"):
        ConnectorConfig.of({"model": "x", "seam": 1})


# -- finding -------------------------------------------------------------------------------------


def compiled(
    ids: Sequence[int], name: str = "a", variant: tuple[tuple[str, str], ...] = (), before: int = 0
) -> Compiled:
    whole = Run((*range(900, 900 + before), *ids))
    run = whole.cut(before, len(whole))
    return Compiled(
        hashlib.sha256(repr((ids, variant)).encode()).hexdigest(), run, name, 1, variant
    )


def index_of(tmp_path: Path, *held: Compiled, min_tokens: int = 16) -> SegmentIndex:
    index = SegmentIndex(KVStore(tmp_path), "f" * 64, min_tokens=min_tokens)
    index._known = {item.key: item for item in held}
    index._rebuild()
    return index


def test_the_longest_segment_at_a_place_wins(tmp_path: Path) -> None:
    short, long = compiled(range(20)), compiled(range(30), "b")
    index = index_of(tmp_path, short, long)
    found = index.find((50, *range(30), 51, *range(20), 52), Wish())
    assert [(item.compiled.name, item.start) for item in found] == [("b", 1), ("a", 32)]


def test_a_segment_that_is_cut_off_is_not_found(tmp_path: Path) -> None:
    assert not index_of(tmp_path, compiled(range(30))).find(range(29), Wish())


def test_what_is_too_short_is_not_found(tmp_path: Path) -> None:
    index = index_of(tmp_path, compiled(range(30)), min_tokens=31)
    assert not index.find(range(30), Wish())


def test_values_choose_variants_and_none_is_chosen_without(tmp_path: Path) -> None:
    ids = tuple(range(20))
    gold, silver = (
        compiled(ids, variant=(("tier", value),), before=len(value)) for value in ("gold", "silver")
    )
    index = index_of(tmp_path, gold, silver, compiled(ids))
    assert index.find(ids, Wish(values={"tier": "gold"}))[0].compiled is gold
    assert not index.find(ids, Wish())
    assert not index.find(ids, Wish(values={"tier": "bronze"}))


def test_a_variant_in_its_place_is_preferred(tmp_path: Path) -> None:
    ids = tuple(range(20))
    here, there = compiled(ids, before=0), compiled(ids, "b", before=3)
    found = index_of(tmp_path, here, there).find((7, 7, 7, *ids), Wish())
    assert found[0].compiled is there


def test_the_index_follows_the_store(tmp_path: Path) -> None:
    segment = segment_of(40)
    store = KVStore(tmp_path)
    index = SegmentIndex(store, segment.identity.fingerprint, min_tokens=16)
    index.refresh(now=True)
    assert len(index) == 0
    entry = store.put(segment, Provenance(name="a", version=3))
    index.refresh(now=True)
    (found,) = index.find((49, 49, *segment.run.token_ids), Wish())
    assert found.compiled.title == "a@3" and found.start == 2
    assert entry is not None
    store.remove([entry.key])
    index.refresh(now=True)
    assert len(index) == 0


# -- planning ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(0, 30),
    st.integers(1, 50),
)
def test_following_a_plan_computes_and_loads_every_token_once(
    parts: list[tuple[int, int]], seam: int, tail: int, budget: int
) -> None:
    ids: list[int] = []
    found = []
    for number, (gap, size) in enumerate(parts):
        ids += [1] * gap
        item = compiled([100 * (number + 1) + i for i in range(size)])
        found.append(Found(item, len(ids)))
        ids += item.run.token_ids
    ids += [2] * tail
    made = plan_splices(ids, found, "f" * 64, num_seam_tokens=seam)
    if made is None:
        return
    done, loaded, computed = 0, 0, 0
    while done < len(ids):
        load = made.due(done)
        if load is not None:
            assert load.target_start == done
            assert load.target_start - load.shift - load.source_start == 0  # compiled at 0
            done, loaded = load.target_stop, loaded + load.num_tokens
            continue
        limit = made.limit(done)
        step = min(budget, len(ids) - done, *([limit - done] if limit is not None else []))
        assert step > 0
        done, computed = done + step, computed + step
    assert loaded == made.num_loaded == made.plan.tokens.total - made.plan.tokens.computed
    assert computed == made.plan.tokens.computed >= 1


@given(st.integers(0, 100), st.integers(1, 200), st.integers(0, 40))
def test_with_one_load_it_begins_at_a_block(gap: int, size: int, seam: int) -> None:
    item = compiled([100 + i for i in range(size)])
    ids = ([1] * gap) + list(item.run.token_ids) + [2] * 5
    made = plan_splices(ids, [Found(item, gap)], "f" * 64, num_seam_tokens=seam, block_size=32)
    if made is None:
        assert -(-(gap + (seam if gap else 0)) // 32) * 32 >= gap + size
        return
    (load,) = made.loads
    assert load.target_start % 32 == 0 and load.target_start < gap + size
    assert load.target_start - gap >= (seam if gap else 0)
    assert load.target_stop == gap + size


# -- names of blocks -----------------------------------------------------------------------------


class FakeRequest:
    """What vLLM's requests have, as far as hashes go."""

    def __init__(self, ids: Sequence[int], block_size: int) -> None:
        self.all_token_ids = list(ids)
        self.block_size = block_size
        self.block_hashes: list[bytes] = []
        self._block_hasher: Any = self._hash
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def _hash(self, request: Any) -> list[bytes]:
        size, made = self.block_size, []
        last = request.block_hashes[-1] if request.block_hashes else b""
        for start in range(len(request.block_hashes) * size, request.num_tokens, size):
            if start + size > request.num_tokens:
                break
            said = repr((last, self.all_token_ids[start : start + size])).encode()
            last = hashlib.sha256(said).digest()
            made.append(last)
        return made

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))


SALTS = st.dictionaries(st.integers(0, 8), st.binary(min_size=1, max_size=4), min_size=1)


@given(st.integers(0, 60), st.integers(0, 20), SALTS, st.integers(1, 7))
def test_salts_rename_blocks_from_the_first_one_on(
    size: int, more: int, salts: dict[int, bytes], block_size: int
) -> None:
    plain = FakeRequest(range(size), block_size)
    salted = FakeRequest(range(size), block_size)
    salt_request(salted, salts, block_size)
    for request in (plain, salted):
        for token in range(more):  # as generated tokens come, one by one
            request.all_token_ids.append(token)
            request.update_block_hashes()
    first = min(salts)
    assert len(salted.block_hashes) == len(plain.block_hashes) == (size + more) // block_size
    assert salted.block_hashes[:first] == plain.block_hashes[:first]
    assert not set(salted.block_hashes[first:]) & set(plain.block_hashes)
    at_once = FakeRequest([*range(size), *range(more)], block_size)
    salt_request(at_once, salts, block_size)
    assert at_once.block_hashes == salted.block_hashes
    unsalt_request(salted)
    assert salted.block_hashes == plain.block_hashes


@given(SALTS, SALTS)
def test_other_salts_give_other_names(one: dict[int, bytes], other: dict[int, bytes]) -> None:
    first, second = FakeRequest(range(40), 4), FakeRequest(range(40), 4)
    salt_request(first, one, 4)
    salt_request(second, other, 4)
    blocks = sorted(one.keys() | other.keys())
    differ = next((block for block in blocks if one.get(block) != other.get(block)), 10)
    assert first.block_hashes[:differ] == second.block_hashes[:differ]
    assert not set(first.block_hashes[differ:]) & set(second.block_hashes[differ:])


# -- layers --------------------------------------------------------------------------------------


def test_layers_are_ordered_by_number() -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0)]
    assert order_of(names) == names[::-1]
    for wrong in (["attn"], ["a.layers.1.x", "b.layers.1.x"]):
        with pytest.raises(UnsupportedModelError):
            order_of(wrong)


@pytest.mark.parametrize(("num_workers", "num_heads"), [(1, 8), (2, 8), (8, 8), (4, 2), (8, 1)])
def test_workers_hold_all_heads_between_them(num_workers: int, num_heads: int) -> None:
    local = max(1, num_heads // num_workers)
    held = [heads_of(rank, num_workers, num_heads, local) for rank in range(num_workers)]
    keys = torch.arange(num_heads)
    joined = torch.cat([keys[part] for part in held])
    copies = max(1, num_workers // num_heads)
    assert torch.equal(joined, keys.repeat_interleave(copies))


def test_heads_that_are_not_shared_out_evenly_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="worker 1 of 2 has 2 of 5 heads"):
        heads_of(1, 2, 5, 2)


def test_slots_leave_out_what_no_block_holds() -> None:
    slots, kept = slots_of([0, 7, 5], 4, 2, 9)
    assert kept.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert slots.tolist() == [28, 29, 30, 31, 20, 21, 22]


def test_a_model_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(SegmentFormatError, match="describes no model"):
        read(path)
    path.write_bytes(b"nothing")
    with pytest.raises(SegmentFormatError, match="describes no model"):
        read(path)


def test_grafana_asks_for_counters_that_there_are() -> None:
    root = Path(__file__).parents[2]
    asked = set(re.findall(r"kvnotes:(\w+)_total", (root / "docs" / "grafana.json").read_text()))
    page = (root / "docs" / "vllm.md").read_text()
    metrics = (root / "kvnotes" / "vllm" / "metrics.py").read_text()
    for name in asked | set(re.findall(r"`kvnotes:(\w+)_total", page)):
        assert f'"{name}"' in metrics
