"""Buffers and caches: who may write what, what forks and cuts share."""

from __future__ import annotations

import gc

import pytest
import torch

from kvnotes.errors import UnknownSegmentError
from kvnotes.plan import Plan, Reuse, Run, layout_token_ids
from kvnotes.segment import (
    GROWTH,
    SPARE_TOKENS,
    Buffer,
    BufferPool,
    KVCache,
    KVSegment,
    Piece,
    clip_pieces,
    join_pieces,
)
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec, RopeSpec

SPEC = ModelSpec(
    model_type="llama",
    layers=(LayerSpec("full", 2, 4), LayerSpec("full", 2, 4)),
    num_attention_heads=4,
    hidden_size=16,
    vocab_size=50,
    max_positions=4096,
    dtype="float32",
    ropes=(RopeSpec("default", 4, "half", "0" * 64),),
)
IDENTITY = ModelIdentity(SPEC, "1" * 64)
IDS = (10, 11, 12, 13, 14, 15)


def filled(capacity: int = 20) -> Buffer:
    """A buffer whose slots hold their own numbers."""
    buffer = Buffer.allocate(SPEC, capacity, torch.float32)
    for layer in (*buffer.keys, *buffer.values):
        layer.copy_(torch.arange(capacity)[None, :, None].expand_as(layer))
    return buffer


def cache_of(buffer: Buffer, ids: tuple[int, ...] = IDS) -> KVCache:
    layout = Plan.prefill(ids).layout
    source = buffer.segment(layout[0].run, 0, IDENTITY)
    return KVCache(layout, [source], [Piece(buffer, 0, 0, len(ids))], buffer, IDENTITY)


# -- buffers -------------------------------------------------------------------------------


def test_a_buffer_has_the_shape_of_every_layer() -> None:
    buffer = Buffer.allocate(SPEC, 7, torch.bfloat16)
    assert [tuple(k.shape) for k in buffer.keys] == [(2, 7, 4), (2, 7, 4)]
    assert [v.dtype for v in buffer.values] == [torch.bfloat16] * 2
    assert buffer.nbytes == 2 * 2 * 7 * 2 * (2 * 4)


def test_a_growing_buffer_has_room_for_turns_but_not_beyond_the_context() -> None:
    pool = BufferPool(SPEC, torch.float32)
    assert pool.take(100).capacity == 100 + SPARE_TOKENS
    assert pool.take(3000).capacity == int(3000 * GROWTH)
    assert pool.take(4000).capacity == SPEC.max_positions
    assert pool.take(5000).capacity == 5000


def test_memory_comes_back_when_the_last_cache_and_segment_in_it_are_gone() -> None:
    pool = BufferPool(SPEC, torch.float32)
    buffer = pool.take(10)
    memory = buffer.keys[0].data_ptr()
    cache = cache_of(buffer)
    segment = buffer.segment(Run((1, 2)), 8, IDENTITY)
    del buffer
    for holder in ("cache", "segment"):
        assert pool.take(10).keys[0].data_ptr() != memory, f"taken while a {holder} stands in it"
        if holder == "cache":
            del cache
        else:
            del segment
        gc.collect()
    assert memory in {pool.take(10).keys[0].data_ptr(), pool.take(10).keys[0].data_ptr()}


def test_two_buffers_never_share_memory() -> None:
    pool = BufferPool(SPEC, torch.float32)
    for _ in range(3):
        held = [pool.take(10) for _ in range(4)]
        starts = [tensor.data_ptr() for b in held for tensor in (*b.keys, *b.values)]
        assert len(set(starts)) == len(starts)
        del held
        gc.collect()


def test_free_memory_that_is_too_small_or_far_too_large_is_not_taken() -> None:
    pool = BufferPool(SPEC, torch.float32)
    small, large = pool.take(10), pool.take(4000)
    memory = {small.keys[0].data_ptr(), large.keys[0].data_ptr()}
    del small, large
    gc.collect()
    taken = pool.take(700)
    assert taken.capacity >= 700 and taken.keys[0].data_ptr() not in memory


def test_a_slot_is_writable_once_nobody_reads_it_or_a_later_one() -> None:
    buffer = filled()
    cache = cache_of(buffer)
    assert buffer.writable(6) and not buffer.writable(5)
    assert buffer.writable(0, except_for=cache)
    fork = cache.fork()
    assert not buffer.writable(5, except_for=cache)
    del fork
    gc.collect()
    assert buffer.writable(0, except_for=cache)


def test_a_segment_of_a_buffer_is_a_view_of_its_slots() -> None:
    buffer = filled()
    segment = buffer.segment(Run(IDS, 3), 3, IDENTITY)
    assert segment.num_tokens == 6
    assert segment.keys[0][0, :, 0].tolist() == [3, 4, 5, 6, 7, 8]
    assert segment.nbytes == 4 * 2 * 6 * 2 * (2 * 4)
    before = segment.checksum()
    buffer.keys[1][:, 8] = 0
    assert segment.checksum() != before


# -- caches --------------------------------------------------------------------------------


def test_a_cache_reads_its_own_slots_and_those_its_runs_came_from() -> None:
    source, target = filled(), filled()
    segment = source.segment(Run(IDS), 2, IDENTITY)
    pieces = [Piece(target, 0, 0, 6)]
    cache = KVCache((segment.run.whole(0),), [segment], pieces, target, IDENTITY)
    assert not target.writable(5) and target.writable(6)
    assert not source.writable(7) and source.writable(8)
    del cache
    gc.collect()
    assert source.writable(0) and target.writable(0)


def test_a_dropped_cache_frees_its_slots_also_when_it_was_closed_first() -> None:
    buffer = filled()
    cache = cache_of(buffer)
    cache.close()
    assert (cache.length, cache.token_ids, cache.sources) == (0, (), ())
    assert buffer.writable(0)


def test_a_fork_shares_everything() -> None:
    cache = cache_of(filled())
    fork = cache.fork()
    assert fork.buffer is cache.buffer
    assert (fork.layout, fork.token_ids) == (cache.layout, cache.token_ids)
    assert fork.checksum() == cache.checksum()


@pytest.mark.parametrize("length", [0, 1, 5, 6, 9])
def test_a_truncated_cache_is_the_cache_of_its_first_tokens(length: int) -> None:
    cache = cache_of(filled())
    short = cache.truncated(length)
    assert short.token_ids == IDS[:length]
    assert short.length == min(length, len(IDS))
    assert short.buffer is cache.buffer
    del cache
    gc.collect()
    assert short.buffer.writable(short.length)


def test_a_truncated_cache_has_the_lineage_of_a_prefill_of_its_tokens() -> None:
    short = cache_of(filled()).truncated(4)
    assert short.canonical_layout == Plan.prefill(IDS[:4]).canonical_layout
    assert short.exact


def test_an_appended_segment_follows_in_the_same_buffer() -> None:
    buffer = filled()
    cache = cache_of(buffer)
    run = Run((20, 21), 6, cache.canonical_layout)
    longer = cache.appended(run, 6)
    assert longer.token_ids == (*IDS, 20, 21)
    assert longer.exact and longer.buffer is buffer
    assert (cache.length, longer.length, longer.end) == (6, 8, 8)
    assert longer.in_place and len(longer.pieces) == 1


def test_a_cache_finds_its_runs_also_by_content_and_no_others() -> None:
    cache = cache_of(filled())
    assert cache.source(cache.layout[0].run).source_id == Run(IDS).digest
    assert cache.source(Run(IDS)) is cache.sources[0]
    with pytest.raises(UnknownSegmentError, match="3 tokens; the cache has 1 others"):
        cache.source(Run((1, 2, 3)))


def test_a_cache_does_not_keep_segments_it_does_not_use() -> None:
    buffer = filled()
    unused = buffer.segment(Run((1, 2)), 10, IDENTITY)
    layout = Plan.prefill(IDS).layout
    used = buffer.segment(layout[0].run, 0, IDENTITY)
    assert KVCache(layout, [unused, used], [], buffer, IDENTITY).sources == (used,)


def test_the_sources_of_a_cache_hold_no_slot_that_the_cache_does_not_read() -> None:
    # a slot behind the end may be overwritten at any time: a run that still claims it would
    # hand out another token's K/V
    cache = cache_of(filled()).truncated(3)
    for segment in cache.sources:
        assert segment.slot + segment.num_tokens <= cache.length


def test_a_checksum_changes_with_the_held_elements_and_no_others() -> None:
    buffer = filled()
    cache = cache_of(buffer)
    before = cache.checksum()
    buffer.values[0][:, cache.length] = -1
    assert cache.checksum() == before
    buffer.values[0][:, cache.length - 1] += 1
    assert cache.checksum() != before


def test_an_empty_cache_has_no_tokens_and_is_exact() -> None:
    cache = KVCache((), [], [], filled(), IDENTITY)
    assert (cache.length, cache.token_ids, cache.exact) == (0, (), True)


def test_a_segment_is_equal_to_itself_only_but_its_run_is_found_by_content() -> None:
    buffer = filled()
    one, other = buffer.segment(Run(IDS), 0, IDENTITY), buffer.segment(Run(IDS), 0, IDENTITY)
    assert one != other and one.run == other.run
    assert isinstance(one, KVSegment) and one.source_id == other.source_id


def test_a_moved_view_counts_as_held_at_its_target() -> None:
    buffer = filled()
    run = Run(IDS)
    view, source = Reuse(run, 1, 4, 0), buffer.segment(run, 0, IDENTITY)
    cache = KVCache((view,), [source], [source.piece(view)], buffer, IDENTITY)
    assert cache.length == 3 and not cache.exact and not cache.in_place
    assert (cache.pieces[0].slot, cache.pieces[0].shift) == (1, -1)
    assert layout_token_ids(cache.layout) == IDS[1:4]


# -- pieces --------------------------------------------------------------------------------


def test_pieces_are_cut_by_position_and_keep_their_distance() -> None:
    buffer = filled()
    pieces = [Piece(buffer, 4, 0, 3), Piece(buffer, 10, 3, 5, shift=7)]
    cut = clip_pieces(pieces, 2, 6)
    assert [(p.slot, p.start, p.num_tokens, p.shift) for p in cut] == [(6, 2, 1, 0), (10, 3, 3, 7)]


def test_pieces_are_joined_where_memory_and_positions_go_on_with_the_same_distance() -> None:
    buffer, other = filled(), filled()
    parts = [
        Piece(buffer, 0, 0, 3),
        Piece(buffer, 3, 3, 2),
        Piece(buffer, 5, 5, 2, shift=1),
        Piece(other, 7, 7, 1, shift=1),
        Piece(other, 9, 8, 1, shift=1),
        Piece(other, 10, 9, 0, shift=1),
    ]
    found = [(p.slot, p.start, p.num_tokens) for p in join_pieces(parts)]
    assert found == [(0, 0, 5), (5, 5, 2), (7, 7, 1), (9, 8, 1)]


def test_a_cache_reads_the_memory_of_its_pieces_beside_that_of_its_sources() -> None:
    own, copies = filled(), filled()
    run = Run(IDS)
    pieces = [Piece(own, 0, 0, 2), Piece(copies, 12, 2, 4)]
    cache = KVCache((run.whole(),), [own.segment(run, 3, IDENTITY)], pieces, copies, IDENTITY)
    assert not own.writable(8) and own.writable(9)
    assert not copies.writable(15) and copies.writable(16)
    assert (cache.end, cache.in_place) == (16, False)
    short = cache.truncated(3)
    assert short.end == 13 and [p.num_tokens for p in short.pieces] == [2, 1]


def test_a_compiled_segment_is_a_piece_of_its_own_memory() -> None:
    run = Run(IDS)
    segment = KVSegment(run, IDENTITY, filled(6).tensors)
    piece = segment.piece(Reuse(run, 2, 5, 40))
    assert (piece.memory, piece.slot, piece.start, piece.shift) == (segment, 2, 40, 38)
