"""K/V that are not what was computed: 8 bits, another dtype. Stated, marked, never twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_store import facts_of, segment_of

from kvnotes.errors import SegmentFormatError
from kvnotes.plan import Plan, Splice, is_exact, plan_compose
from kvnotes.segment import KVSegment
from kvnotes.store import converted, load_segment, open_segment, save_segment
from kvnotes.store.int8 import LEVELS, MIN_SCALE, dequantize, quantize

NAME = "x.kv.safetensors"


def float64(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.double().numpy()


def wide(dtype: str, num_tokens: int = 400) -> KVSegment:
    """A segment with heads of 128, some of them with outliers, as models have them."""
    segment = segment_of(num_tokens, dtype=dtype, num_layers=2, num_kv_heads=2, head_dim=128)
    segment.keys[0][0, :, 5] *= 50
    segment.values[1][1, 7] *= 1e-3
    return segment


# -- the stated error ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_stated_error_is_that_of_what_is_loaded(tmp_path: Path, dtype: str) -> None:
    segment = wide(dtype)
    header = save_segment(tmp_path / NAME, segment, int8=True)
    loaded = load_segment(tmp_path / NAME)
    largest, mean = [], []
    pairs = zip(segment.keys + segment.values, loaded.keys + loaded.values, strict=True)
    for before, after in pairs:
        assert after.dtype == before.dtype
        exact, error = float64(before), float64(before) - float64(after)
        largest.append(np.abs(error).max() / np.abs(exact).max())
        mean.append(np.sqrt((error**2).mean() / (exact**2).mean()))
    assert header.payload.max_error == pytest.approx(max(largest), rel=1e-4)
    assert header.payload.rms_error == pytest.approx(max(mean), rel=1e-4)
    assert 0 < header.payload.max_error < 0.5 / LEVELS * 1.6


def test_no_value_is_off_by_more_than_half_a_level() -> None:
    tensor = torch.randn(2, 50, 64) * torch.logspace(-6, 6, 50)[None, :, None]
    found = quantize(tensor)
    error = np.abs(float64(tensor) - float64(dequantize(found.levels, found.scale, tensor.dtype)))
    assert (error <= float64(found.scale) * 0.5 * (1 + 1e-5)).all()
    row = np.abs(float64(tensor)).max(-1, keepdims=True)
    expected = np.maximum(row / LEVELS, MIN_SCALE)
    assert np.allclose(float64(found.scale), expected, rtol=2**-11)


def test_zeros_stay_zero_and_have_no_error() -> None:
    found = quantize(torch.zeros(1, 3, 4))
    assert not found.levels.any() and (found.max_error, found.rms_error) == (0.0, 0.0)


@pytest.mark.parametrize(("largest", "fits"), [(65504 * 127.0, True), (65504 * 128.0, False)])
def test_values_whose_scale_is_no_float16_are_refused(largest: float, fits: bool) -> None:
    tensor = torch.full((1, 1, 2), largest)
    if fits:
        assert quantize(tensor).max_error < 0.01
        return
    with pytest.raises(SegmentFormatError, match="cannot be stored in 8 bits"):
        quantize(tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    segment = segment_of()
    segment.keys[0][0, 0, 0] = value
    with pytest.raises(SegmentFormatError, match="cannot be stored in 8 bits"):
        save_segment(tmp_path / NAME, segment, int8=True)
    assert not list(tmp_path.iterdir())


def test_no_level_and_scale_of_a_file_give_an_infinite_value() -> None:
    # a float16 ends at 65504: the largest level of the largest scale lies far beyond
    levels = torch.tensor([[[127, -128]]], dtype=torch.int8)
    scale = torch.full((1, 1, 1), 65504.0, dtype=torch.float16)
    found = dequantize(levels, scale, torch.float16)
    assert found.tolist() == [[[65504.0, -65504.0]]]


def test_the_largest_float16_survives() -> None:
    tensor = torch.full((1, 1, 2), 65504.0, dtype=torch.float16)
    found = quantize(tensor)
    assert torch.isfinite(dequantize(found.levels, found.scale, torch.float16)).all()


# -- size and key --------------------------------------------------------------------------


def test_int8_halves_a_file_of_bfloat16_and_quarters_one_of_float32(tmp_path: Path) -> None:
    for dtype, share in (("bfloat16", 0.53), ("float16", 0.53), ("float32", 0.27)):
        segment = wide(dtype)
        save_segment(tmp_path / "exact", segment)
        save_segment(tmp_path / "int8", segment, int8=True)
        sizes = [(tmp_path / name).stat().st_size for name in ("int8", "exact")]
        assert sizes[0] <= share * sizes[1]


def test_int8_has_a_key_of_its_own_and_says_what_it_is(tmp_path: Path) -> None:
    segment = segment_of()
    exact = save_segment(tmp_path / "exact", segment)
    header = save_segment(tmp_path / NAME, segment, int8=True)
    assert (header.altered, header.payload.kind) == ("int8:float32", "int8")
    assert header.key != exact.key and header.fingerprint == exact.fingerprint
    assert open_segment(tmp_path / NAME).header.key == header.key
    half = converted(segment, "float16")
    keys = {exact.key, header.key, save_segment(tmp_path / "c", half).key}
    assert len(keys) == 3


def test_int8_is_the_same_file_each_time(tmp_path: Path) -> None:
    headers = [save_segment(tmp_path / name, wide("bfloat16"), int8=True) for name in "ab"]
    assert headers[0].tensors == headers[1].tensors


def test_what_was_rounded_is_not_rounded_again(tmp_path: Path) -> None:
    save_segment(tmp_path / NAME, segment_of(), int8=True)
    loaded = load_segment(tmp_path / NAME)
    for int8 in (True, False):
        with pytest.raises(SegmentFormatError, match=r"is altered already \(int8:float32\)"):
            save_segment(tmp_path / "again", loaded, int8=int8)
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_heads_of_an_odd_size_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SegmentFormatError, match="no multiple of its item size"):
        save_segment(tmp_path / NAME, segment_of(3, head_dim=3), int8=True)
    assert not list(tmp_path.iterdir())
    save_segment(tmp_path / NAME, segment_of(3, head_dim=3))


# -- never exact ---------------------------------------------------------------------------


def altered_segments(folder: Path) -> list[KVSegment]:
    segment = segment_of(6)
    save_segment(folder / "int8", segment, int8=True)
    save_segment(folder / "half", converted(segment, "float16"))
    return [load_segment(folder / name) for name in ("int8", "half")]


def test_a_plan_that_reuses_altered_kv_is_never_exact_whatever_it_reuses(tmp_path: Path) -> None:
    exact = segment_of(6)
    ids = exact.run.token_ids
    assert is_exact((exact.run.whole(0),))
    for segment in altered_segments(tmp_path):
        assert segment.run.token_ids == ids
        assert not is_exact((segment.run.whole(0),))
        assert not is_exact((segment.run.whole(0).clip(0, 3), exact.run.whole(0).clip(3, 6)))
        assert not is_exact((exact.run.whole(0).clip(0, 3), segment.run.whole(0).clip(3, 6)))
        splice = Splice("s", segment.run, 0, 5, 0)
        plan = plan_compose(ids, [splice], num_seam_tokens=0)
        assert not plan.exact
        assert plan.digest != Plan.prefill(ids).digest
        assert plan_compose(ids, [Splice("s", exact.run, 0, 5, 0)], num_seam_tokens=0).exact


def test_no_altered_run_shares_its_digest_with_an_exact_one(tmp_path: Path) -> None:
    runs = [segment_of(6).run, *(segment.run for segment in altered_segments(tmp_path))]
    assert len({run.digest for run in runs}) == 3
    for stop in (1, 5):
        assert len({run.cut(0, stop).digest for run in runs}) == 3


# -- another dtype -------------------------------------------------------------------------


def test_conversion_rounds_once_and_gives_a_key_of_its_own(tmp_path: Path) -> None:
    segment = segment_of(4, 1)
    half = converted(segment, "bfloat16")
    assert converted(segment, "float32") is segment
    for one, other in zip(half.keys + half.values, segment.keys + segment.values, strict=True):
        assert torch.equal(one, other.bfloat16())
    header = save_segment(tmp_path / NAME, half)
    assert (header.payload.kind, header.payload.source_dtype) == ("converted", "float32")
    assert (header.altered, header.identity.spec.dtype) == ("from:float32", "bfloat16")
    assert facts_of(load_segment(tmp_path / NAME)) == facts_of(half)
    computed = save_segment(tmp_path / "y", segment_of(4, 1, "bfloat16"))
    assert computed.fingerprint == header.fingerprint and computed.key != header.key


def test_conversion_is_refused_a_second_time_and_where_it_overflows(tmp_path: Path) -> None:
    half = converted(segment_of(4, 1), "float16")
    save_segment(tmp_path / NAME, half)
    for segment in (half, load_segment(tmp_path / NAME)):
        with pytest.raises(SegmentFormatError, match="is not rounded twice"):
            converted(segment, "bfloat16")
        with pytest.raises(SegmentFormatError, match=r"is altered already \(from:float32\)"):
            save_segment(tmp_path / "y", segment, int8=True)
    large = segment_of(4)
    large.keys[0][0, 0, 0] = 1e5
    with pytest.raises(SegmentFormatError, match="'float32' overflow in 'float16'"):
        converted(large, "float16")
    for dtype in ("int8", "float64", "nothing", "__class__"):
        with pytest.raises(SegmentFormatError, match="cannot be converted"):
            converted(large, dtype)
