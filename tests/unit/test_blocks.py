"""What a pass reads: every key that a query sees once, in the memory where it stands."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from helpers_laws import BEARTYPE_IN_STRATEGIES, laws
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvnotes.engine import blocks
from kvnotes.engine.blocks import (
    ALL,
    SPLIT_QUERIES,
    MaskFunction,
    Read,
    Reading,
    Reads,
    are_all,
    blocks_of,
)
from kvnotes.errors import EngineError
from kvnotes.rope import Rotary, move_keys
from kvnotes.segment import Buffer, Piece
from kvnotes.spec import LayerSpec, ModelSpec, RopeSpec

pytestmark = BEARTYPE_IN_STRATEGIES

DIM = 4
SPEC = ModelSpec(
    model_type="llama",
    layers=(LayerSpec("full", 2, DIM),),
    num_attention_heads=4,
    hidden_size=16,
    vocab_size=50,
    max_positions=4096,
    dtype="float32",
    ropes=(RopeSpec("default", DIM, "half", "0" * 64),),
)

ROUNDING = 1e-6
"""Of a rotation: the table's angles are float32, at positions of a few dozen."""

Seen = Counter[tuple[int, int, int]]
"""How often each (memory, slot, row of a query) is read."""


def rotary() -> Rotary:
    frequencies = torch.tensor([1.0, 0.1])

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * frequencies
        return angles.cos(), angles.sin()

    return Rotary(SPEC.ropes[0], table)


def memory(capacity: int = 32) -> Buffer:
    return Buffer.allocate(SPEC, capacity, torch.float32)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def window(size: int) -> MaskFunction:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - size)

    return seen


def reading(queries: Sequence[int], *pieces: Piece, own: Tensor | None = None) -> Reading:
    return Reading(torch.tensor(queries), pieces, own)


def reads_of(*readings: Reading) -> Reads:
    return Reads(readings, [rotary()], [0])


def rows_of(read: Read, num_queries: int) -> list[int]:
    chosen: list[int] = torch.arange(num_queries)[read.rows].tolist()
    return chosen


def found_in(found: Sequence[Read], num_queries: int) -> Seen:
    """What some reads read."""
    seen: Seen = Counter()
    for read in found:
        rows = rows_of(read, num_queries)
        for (i, row), (j, slot) in itertools.product(
            enumerate(rows), enumerate(range(read.start, read.stop))
        ):
            if read.causal:
                assert read.seen is None and len(rows) == read.stop - read.start
            visible = j <= i if read.causal else read.seen is None or bool(read.seen[i, j])
            seen[id(read.memory), slot, row] += visible
    return +seen


def wanted_of(readings: Sequence[Reading], mask: MaskFunction) -> Seen:
    """What the queries see, token by token."""
    seen: Seen = Counter()
    row = 0
    nothing = torch.tensor(0)
    for one in readings:
        for query in one.queries:
            for piece in one.pieces:
                for i in range(piece.num_tokens):
                    if mask(nothing, nothing, query, torch.tensor(piece.start + i)):
                        seen[id(piece.memory), piece.slot + i, row] += 1
            row += 1
    return seen


def shift_of(readings: Sequence[Reading], read: Read, row: int) -> int:
    """How far a query's sequence has moved what a read reads."""
    owners = [one for one in readings for _ in one.queries]
    (shift,) = {
        piece.shift
        for piece in owners[row].pieces
        if piece.memory is read.memory and piece.slot < read.stop and piece.slot_stop > read.start
    }
    return shift


def check_turns(
    reads: Reads, readings: Sequence[Reading], found: Sequence[Read], num_queries: int
) -> None:
    """Each query is turned back by as much as its sequence has moved the keys."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 3, num_queries, DIM, generator=random)
    for read in found:
        rows = rows_of(read, num_queries)
        shifts = torch.tensor([shift_of(readings, read, row) for row in rows])
        here = torch.full_like(shifts, 50)
        expected = move_keys(query[0][:, rows], here, here - shifts, rotary())
        assert (reads.turned(query, read, 0)[0] - expected).abs().max() < ROUNDING


# -- blocks --------------------------------------------------------------------------------


def test_pieces_side_by_side_in_memory_are_one_block_in_whatever_order_they_are_read() -> None:
    held = memory()
    found = blocks_of([Piece(held, 4, 0, 3), Piece(held, 0, 3, 4), Piece(held, 7, 9, 2)])
    (block,) = found
    assert (block.memory, block.slot, block.num_keys) == (held, 0, 9)
    assert block.places.tolist() == [[3, 4, 5, 6, 0, 1, 2, 9, 10]]
    assert block.moves == ((3, 0),) and are_all(block.rows)


@pytest.mark.parametrize(
    ("slot", "shift"), [(5, 0), (4, 7)], ids=["a gap between them", "another shift"]
)
def test_pieces_that_cannot_be_read_at_once_are_two_blocks(slot: int, shift: int) -> None:
    held = memory()
    found = blocks_of([Piece(held, 0, 0, 4), Piece(held, slot, 20, 3, shift)])
    assert [(b.slot, b.num_keys) for b in found] == [(0, 4), (slot, 3)]
    assert found[1].moves == ((20, shift),)


def test_pieces_of_two_memories_are_two_blocks() -> None:
    one, two = memory(), memory()
    found = blocks_of([Piece(one, 0, 0, 4), Piece(two, 4, 4, 4)])
    assert {id(block.memory) for block in found} == {id(one), id(two)}


def test_a_read_is_the_memory_itself() -> None:
    held = memory()
    (read,) = reads_of(reading([9], Piece(held, 2, 0, 5, 3))).seen(causal)
    keys, values = read.layer(0)
    assert keys.shape == (1, 2, 5, DIM)
    assert keys.data_ptr() == held.keys[0][:, 2:].data_ptr()
    assert values.data_ptr() == held.values[0][:, 2:].data_ptr()


# -- several sequences ---------------------------------------------------------------------


def test_sequences_that_moved_a_segment_alike_read_it_once_with_one_turn() -> None:
    policy, own = memory(), [memory(), memory()]
    both = [
        reading([30 + i], Piece(policy, 0, 8, 10, 8), Piece(own[i], 0, 18, 12 + i))
        for i in range(2)
    ]
    reads = reads_of(*both)
    found = reads.seen(causal)
    shared = [read for read in found if read.memory is policy]
    assert len(found) == 3 and len(shared) == 1
    assert shared[0].rows == slice(0, 2) and shared[0].seen is None
    (turn,) = shared[0].turns
    assert turn is not None and turn.shape == (DIM, DIM)
    check_turns(reads, both, found, 2)


def test_sequences_that_moved_a_segment_differently_read_it_once_each_turned_its_way() -> None:
    policy = memory()
    both = [reading([40], Piece(policy, 0, shift, 10, shift)) for shift in (3, 0, 11)]
    reads = reads_of(*both)
    found = reads.seen(causal)
    assert [(read.rows, read.start, read.stop) for read in found] == [(slice(0, 3), 0, 10)]
    (turn,) = found[0].turns
    assert turn is not None and turn.shape == (3, DIM, DIM)
    assert torch.equal(turn[1], torch.eye(DIM)), "this one is not turned"
    check_turns(reads, both, found, 3)


def test_a_sequence_between_others_that_share_does_not_read_with_them() -> None:
    policy, other = memory(), memory()
    three = [reading([40], Piece(held, 0, 0, 10)) for held in (policy, other, policy)]
    rows = {id(r.memory): rows_of(r, 3) for r in reads_of(*three).seen(causal)}
    assert rows == {id(policy): [0, 2], id(other): [1]}


def test_sequences_that_see_different_parts_of_a_shared_block_have_a_mask() -> None:
    policy = memory()
    both = [reading([query], Piece(policy, 0, 0, 20)) for query in (12, 14)]
    (read,) = reads_of(*both).seen(window(5))
    assert (read.start, read.stop) == (8, 15)
    assert read.seen is not None
    assert read.seen.tolist() == [[True] * 5 + [False] * 2, [False] * 2 + [True] * 5]


# -- who sees what -------------------------------------------------------------------------


def test_a_window_cuts_the_keys_at_both_ends() -> None:
    held = memory()
    (read,) = reads_of(reading([10], Piece(held, 5, 0, 20))).seen(window(4))
    assert (read.start, read.stop) == (5 + 7, 5 + 11)
    assert read.seen is None


@pytest.mark.parametrize(
    ("queries", "rows"),
    [([3, 4, 50], slice(0, 2)), ([60, 3, 4], slice(1, 3)), ([3, 50, 4], [0, 2])],
)
def test_queries_that_see_nothing_of_a_block_are_left_out(
    queries: list[int], rows: slice | list[int]
) -> None:
    held = memory()
    one = reading(queries, Piece(held, 0, 0, 20, 6))
    reads = reads_of(one)
    (read,) = reads.seen(window(5))
    assert (read.rows if isinstance(rows, slice) else rows_of(read, 3)) == rows
    check_turns(reads, [one], [read], 3)


def test_a_block_that_nobody_sees_is_not_read() -> None:
    far = reading([60], Piece(memory(), 0, 0, 20), Piece(memory(), 0, 20, 0))
    assert reads_of(far).seen(window(5)) == ()


@pytest.mark.parametrize("size", [SPLIT_QUERIES - 1, SPLIT_QUERIES])
def test_many_new_tokens_in_order_are_read_apart_and_causally(size: int) -> None:
    held = memory(200)
    one = reading(range(40, 40 + size), Piece(held, 0, 0, 40 + size))
    found = reads_of(one).seen(causal)
    shapes = [(read.start, read.stop, read.causal) for read in found]
    split = [(0, 40, False), (40, 40 + size, True)]
    assert shapes == (split if size >= SPLIT_QUERIES else [(0, 40 + size, False)])
    assert found_in(found, size) == wanted_of([one], causal)


@pytest.mark.parametrize(
    ("queries", "mask"),
    [
        ([*range(40, 72), *range(80, 112)], causal),
        (range(40, 104), window(50)),
        (range(39, 103), causal),
    ],
    ids=["with a gap", "in a window", "behind others of the same memory"],
)
def test_new_tokens_that_are_not_simply_causal_are_read_under_a_mask(
    queries: Sequence[int], mask: MaskFunction
) -> None:
    held = memory(200)
    one = reading(queries, Piece(held, 0, 0, 112 if queries[-1] == 111 else 104))
    found = reads_of(one).seen(mask)
    assert not any(read.causal for read in found)
    assert found_in(found, len(queries)) == wanted_of([one], mask)


def test_new_tokens_of_several_sequences_are_not_split() -> None:
    held = [memory(200), memory(200)]
    both = [reading(range(70), Piece(one, 0, 0, 70)) for one in held]
    found = reads_of(*both).seen(causal)
    assert not any(read.causal for read in found)
    assert found_in(found, 140) == wanted_of(both, causal)


def test_own_limits_what_new_tokens_see_of_each_other() -> None:
    # two choices of two tokens each, side by side behind a prompt in another memory
    prompt, held = memory(), memory()
    depth = [5, 6, 5, 6]
    new = [Piece(held, 3 + i, at, 1) for i, at in enumerate(depth)]
    own = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]).bool()
    one = reading(depth, Piece(prompt, 0, 0, 5), *new, own=own)
    found = reads_of(one).seen(causal)
    seen = found_in(found, 4)
    for row, slot in itertools.product(range(4), range(5)):
        assert seen[id(prompt), slot, row] == 1
    for row, column in itertools.product(range(4), range(4)):
        assert seen[id(held), 3 + column, row] == own[row, column]


def test_own_limits_the_last_tokens_of_a_block_that_the_prompt_begins() -> None:
    held = memory()
    own = torch.eye(3, dtype=torch.bool)
    new = [Piece(held, 4 + i, 4, 1) for i in range(3)]
    one = reading([4, 4, 4], Piece(held, 0, 0, 4), *new, own=own)
    seen = found_in(reads_of(one).seen(causal), 3)
    assert all(seen[id(held), slot, row] == 1 for slot in range(4) for row in range(3))
    assert all(seen[id(held), 4 + i, row] == own[row, i] for i in range(3) for row in range(3))


@st.composite
def sequences(draw: st.DrawFn) -> list[Reading]:
    """Sequences over a few memories, each token of which was computed for one position."""
    held = []
    for _ in range(draw(st.integers(1, 3), label="memories")):
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        order = draw(st.permutations(range(len(sizes))))
        places = dict.fromkeys(range(len(sizes)), 0)
        for before, index in enumerate(order):
            places[index] = sum(sizes[i] for i in order[:before])
        held.append((memory(sum(sizes)), list(zip(starts, sizes, places.values(), strict=True))))
    found = []
    for _ in range(draw(st.integers(1, 4), label="sequences")):
        pieces = []
        for buffer, stretches in draw(st.lists(st.sampled_from(held), min_size=1, unique_by=id)):
            shift = draw(st.sampled_from([0, 0, 3, 11]))
            chosen = draw(st.lists(st.sampled_from(stretches), min_size=1, unique=True))
            for slot, size, place in chosen:
                cut = draw(st.integers(0, size - 1))
                at = place + cut + shift
                pieces.append(Piece(buffer, slot + cut, at, size - cut, shift))
        last = max(piece.stop for piece in pieces)
        queries = draw(st.lists(st.integers(0, last), min_size=1, max_size=6, unique=True))
        found.append(reading(sorted(queries), *pieces))
    return found


masks: dict[str, MaskFunction] = {"causal": causal, "window": window(4), "narrow": window(1)}


@laws(150)
@given(readings=sequences(), name=st.sampled_from(sorted(masks)), split=st.sampled_from([2, 64]))
def test_every_key_is_read_once_by_those_who_see_it_and_turned_as_it_stands(
    readings: list[Reading], name: str, split: int
) -> None:
    reads = reads_of(*readings)
    size = len(reads.queries)
    with patch.object(blocks, "SPLIT_QUERIES", split):
        found = reads.seen(masks[name])
    assert found_in(found, size) == wanted_of(readings, masks[name])
    check_turns(reads, readings, found, size)
    for read in found:
        assert read.stop > read.start and rows_of(read, size)


# -- masks and tokens ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mask_repeats_its_rows_for_packed_queries(dtype: torch.dtype) -> None:
    held = memory()
    (read,) = reads_of(reading([2, 4], Piece(held, 0, 0, 6))).seen(causal)
    mask = read.mask(3, dtype)
    assert mask is not None and mask.shape == (1, 1, 6, 5)
    lowest = torch.finfo(dtype).min
    assert mask[0, 0].tolist() == [[0, 0, 0, lowest, lowest], [0] * 5] * 3
    assert read.mask(3, dtype) is mask and read.mask(1, dtype) is not mask


def test_a_read_of_all_keys_by_all_queries_has_no_mask() -> None:
    (read,) = reads_of(reading([7, 8], Piece(memory(), 0, 0, 6))).seen(causal)
    assert read.mask(2, torch.float32) is None and read.rows == ALL


def test_a_token_for_a_mask_has_its_shape_and_takes_no_memory() -> None:
    reads = reads_of(
        reading([7, 8], Piece(memory(), 0, 0, 9)), reading([3], Piece(memory(), 0, 0, 4))
    )
    token = reads.mask(causal, torch.float16)
    assert token.shape == (1, 1, 3, 9) and token.dtype == torch.float16
    assert token.untyped_storage().nbytes() == 2
    assert [r.stop - r.start for r in reads.of_mask(token)] == [9, 4]


def test_two_masks_of_one_pass_are_two_tokens() -> None:
    reads = reads_of(reading([7], Piece(memory(), 0, 0, 8)))
    near, far = reads.mask(window(2), torch.float32), reads.mask(causal, torch.float32)
    assert [r.start for r in reads.of_mask(near)] == [6]
    assert [r.start for r in reads.of_mask(far)] == [0]


@pytest.mark.parametrize(
    "change",
    [lambda token: None, torch.clone, lambda token: token[:, :, :, :3], lambda token: token + 0],
    ids=["no mask", "a copy", "a part", "a sum"],
)
def test_a_mask_that_a_model_has_changed_is_refused(
    change: Callable[[Tensor], Tensor | None],
) -> None:
    reads = reads_of(reading([7], Piece(memory(), 0, 0, 8)))
    token = reads.mask(causal, torch.float32)
    with pytest.raises(EngineError, match="a mask that no pass of ours has made"):
        reads.of_mask(change(token))


def test_keys_that_a_model_has_changed_are_refused() -> None:
    reads = reads_of(reading([7], Piece(memory(), 0, 0, 8)))
    keys = torch.zeros(1, 2, 1, DIM)
    with pytest.raises(EngineError, match="keys that no pass of ours has made"):
        reads.layer_of(keys)
    reads.written(keys, 5)
    assert reads.layer_of(keys) == 5
    with pytest.raises(EngineError, match="keys that no pass of ours has made"):
        reads.layer_of(keys.repeat_interleave(2, 1))


def test_layers_without_positions_are_not_turned() -> None:
    readings = [reading([20], Piece(memory(), 0, 4, 8, 4))]
    reads = Reads(readings, [rotary()], [0, None])
    (read,) = reads.seen(causal)
    query = torch.ones(1, 3, 1, DIM)
    assert not torch.equal(reads.turned(query, read, 0), query)
    assert torch.equal(reads.turned(query, read, 1), query)
