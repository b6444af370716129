"""Law 7: load(save(x)) is x, and a damaged file is refused or holds x all the same."""

from __future__ import annotations

import os
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers_laws import laws
from helpers_models import engine, tokens
from helpers_store import facts_of, segment_of
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.errors import SegmentFormatError, TrustError
from kvnotes.plan import Splice, plan_compose
from kvnotes.store import Provenance, Trust, digest_text, load_segment, open_segment, save_segment
from kvnotes.store.header import FieldSpan

SIGNING_KEY = bytes(range(32))
WAYS = {
    "plain": Trust(),
    "signed": Trust(signing_key=SIGNING_KEY),
    "sealed": Trust(encryption_key=bytes(32)),
    "both": Trust(signing_key=SIGNING_KEY, encryption_key=bytes(32)),
}
every_way = pytest.mark.parametrize("way", WAYS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@st.composite
def sources(draw: st.DrawFn) -> Provenance:
    text = draw(TEXTS)
    return Provenance(
        name=draw(NAMES),
        version=draw(st.integers(0, 2**48 - 1)),
        text=text,
        text_sha256=digest_text(text),
        role=draw(st.sampled_from(["", "system", "tool"])),
        spans=tuple(
            FieldSpan(name=name, value=value, start=0, stop=1)
            for name, value in draw(st.lists(st.tuples(NAMES, TEXTS), max_size=3))
        ),
        variant=tuple(draw(st.lists(st.tuples(NAMES, TEXTS), max_size=3))),
    )


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# -- load(save(x)) is x --------------------------------------------------------------------


@every_dtype
@every_way
@laws(12)
@given(
    num_tokens=st.integers(1, 40),
    num_preamble=st.integers(0, 6),
    seed=st.integers(0, 99),
    tenant=NAMES,
    source=sources(),
)
def test_a_loaded_segment_is_the_saved_one_bit_by_bit(
    dtype: torch.dtype,
    way: str,
    num_tokens: int,
    num_preamble: int,
    seed: int,
    tenant: str,
    source: Provenance,
) -> None:
    segment = engine("llama-gqa", dtype).compile(
        tokens(num_tokens, seed), tokens(num_preamble, seed + 1)
    )
    with folder() as place:
        header = save_segment(
            place / "x", segment, tenant=tenant, provenance=source, trust=WAYS[way]
        )
        opened = open_segment(place / "x", trust=WAYS[way])
        assert opened.header == header and opened.header.provenance == source
        assert facts_of(load_segment(place / "x", trust=WAYS[way])) == facts_of(segment)
        save_segment(place / "y", opened.segment())
        assert facts_of(load_segment(place / "y")) == facts_of(segment)


@every_dtype
def test_a_loaded_segment_computes_what_the_saved_one_does(dtype: torch.dtype) -> None:
    model = engine("qwen3-qknorm", dtype)
    segment = model.compile(tokens(20, 1), tokens(3, 2))
    with folder() as place:
        save_segment(place / "x", segment)
        loaded = load_segment(place / "x")
    ids = (*tokens(9, 3), *segment.run.token_ids, *tokens(4, 4))
    plan = plan_compose(ids, [Splice("s", segment.run, 0, 20, 9)], num_seam_tokens=1)
    before = model.execute(plan, segments=[segment]).last_logits()
    assert torch.equal(model.execute(plan, segments=[loaded]).last_logits(), before)


@pytest.mark.parametrize("part", range(16))
def test_every_finite_half_survives_also_the_smallest_and_minus_zero(part: int) -> None:
    """All patterns of float16 and bfloat16 that are finite, 4096 at a time."""
    for dtype in ("float16", "bfloat16"):
        segment = segment_of(2048, dtype=dtype)
        pattern = torch.arange(part * 4096, (part + 1) * 4096, dtype=torch.int32).to(torch.int16)
        values = pattern.view(segment.keys[0].dtype)
        values[~torch.isfinite(values)] = -0.0
        segment.keys[0].copy_(values.view(1, 2048, 2))
        with folder() as place:
            save_segment(place / "x", segment)
            assert facts_of(load_segment(place / "x")) == facts_of(segment)


# -- a damaged file ------------------------------------------------------------------------


class Damaged:
    """A small file, of which bytes are changed in place and put back."""

    def __init__(self, place: Path, way: str) -> None:
        self.path = place / "x"
        self.trust = WAYS[way]
        segment = segment_of(5, 1, "bfloat16")
        text = "Text \u20ac"
        source = Provenance(name="a", text=text, text_sha256=digest_text(text), role="system")
        self.header = save_segment(
            self.path, segment, tenant="t", provenance=source, trust=self.trust
        )
        self.facts = facts_of(segment)
        self.content = self.path.read_bytes()
        size = struct.unpack("<Q", self.content[:8])[0]
        self.header_stop = 8 + size
        self.text_stop = 8 + len(self.content[8 : 8 + size].rstrip())
        self.file = os.open(self.path, os.O_RDWR)

    def is_refused(self) -> bool:
        """Whether it is; if not, it must hold what was saved."""
        try:
            opened = open_segment(self.path, trust=self.trust)
            opened.verify()
        except (SegmentFormatError, TrustError):
            return True
        assert opened.header == self.header
        assert facts_of(opened.segment()) == self.facts
        return False

    def put(self, content: bytes, start: int = 0) -> None:
        """Change bytes from `start` on; from 0 on it is a whole file."""
        os.pwrite(self.file, content, start)
        os.ftruncate(self.file, len(self.content) if start else len(content))

    def put_byte(self, byte: int, index: int) -> None:
        """Change one byte."""
        os.pwrite(self.file, bytes([byte]), index)


@contextmanager
def damaged_file(way: str) -> Iterator[Damaged]:
    with folder() as place:
        file = Damaged(place, way)
        assert not file.is_refused()
        yield file
        os.close(file.file)


@pytest.fixture
def damaged(request: pytest.FixtureRequest) -> Iterator[Damaged]:
    with damaged_file(request.param) as file:
        yield file


every_damaged = pytest.mark.parametrize("damaged", ["plain", "signed", "sealed"], indirect=True)


@every_damaged
def test_any_changed_byte_of_the_file_is_refused_or_changes_nothing(damaged: Damaged) -> None:
    """Every byte of the file, blanks included, to a random other value."""
    random_, kept = random.Random(0), 0
    for index, byte in enumerate(damaged.content):
        damaged.put_byte(byte ^ random_.randrange(1, 256), index)
        refused = damaged.is_refused()
        assert refused or damaged.text_stop <= index < damaged.header_stop, index
        kept += not refused
        damaged.put_byte(byte, index)
    assert kept < 100  # blanks that became other blanks


@every_damaged
def test_any_flipped_bit_of_the_header_and_the_tensors_is_refused(damaged: Damaged) -> None:
    tensors = range(damaged.header_stop, len(damaged.content))
    for index in (*range(8), *range(8, damaged.text_stop, 7), *tensors):
        for bit in range(8):
            damaged.put_byte(damaged.content[index] ^ (1 << bit), index)
            assert damaged.is_refused(), (index, bit)
        damaged.put_byte(damaged.content[index], index)


@every_damaged
def test_a_file_cut_off_anywhere_is_refused(damaged: Damaged) -> None:
    for size in range(len(damaged.content) - 1, -1, -1):
        os.ftruncate(damaged.file, size)
        assert damaged.is_refused(), size


@every_damaged
def test_a_file_with_a_byte_missing_or_doubled_is_refused(damaged: Damaged) -> None:
    content = damaged.content
    edges = {0, 1, 7, 8, 9, damaged.text_stop, damaged.header_stop, len(content) - 1}
    for index in sorted(edges | set(range(0, len(content), 13))):
        damaged.put(content[:index] + content[index + 1 :])
        assert damaged.is_refused(), index
        damaged.put(content[:index] + content[index : index + 1] + content[index:])
        assert damaged.is_refused(), index


@every_damaged
@pytest.mark.parametrize("more", [b"\0", b" ", b"x" * 4096])
def test_a_file_with_bytes_behind_its_end_is_refused(damaged: Damaged, more: bytes) -> None:
    damaged.put(damaged.content + more)
    assert damaged.is_refused()
    damaged.put(damaged.content * 2)
    assert damaged.is_refused()


@pytest.mark.parametrize("way", ["plain", "signed", "sealed"])
@laws(40)
@given(data=st.data())
def test_any_edit_of_bytes_is_refused_or_changes_nothing(way: str, data: st.DataObject) -> None:
    with damaged_file(way) as damaged:
        content = bytearray(damaged.content)
        for _ in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, len(content)))
            length = data.draw(st.integers(0, 40))
            source = data.draw(st.integers(0, len(content)))
            copied = st.just(bytes(content[source : source + length]))
            content[start : start + length] = data.draw(st.binary(max_size=40) | copied)
        damaged.put(bytes(content))
        damaged.is_refused()
