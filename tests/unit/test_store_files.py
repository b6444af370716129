"""Opening files: every kind of wrong file is refused, good ones are verified once and mapped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_store import (
    at,
    canonical,
    facts_of,
    joined,
    raw_bytes,
    segment_of,
    taken_apart,
    with_header,
    with_text,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.store import VerifiedFiles, load_segment, open_segment, opening, save_segment, saving

NAME = "x.kv.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file."""
    target = tmp_path / NAME
    save_segment(target, segment_of(3, 2))
    return target


def refusal(path: Path) -> str:
    with pytest.raises(SegmentFormatError) as caught:
        load_segment(path)
    assert caught.value.hint and caught.value.message.isprintable()
    return caught.value.message


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


# -- against another implementation --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_safetensors_library_reads_the_same_tensors(tmp_path: Path, dtype: str) -> None:
    segment = segment_of(5, 1, dtype, num_layers=2, num_kv_heads=2, head_dim=4)
    save_segment(tmp_path / NAME, segment)
    found = load_file(tmp_path / NAME)
    expected = {f"keys.{i}": t for i, t in enumerate(segment.keys)}
    expected |= {f"values.{i}": t for i, t in enumerate(segment.values)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert raw_bytes(found[name]) == raw_bytes(tensor)
    with safe_open(tmp_path / NAME, "pt") as file:
        assert json.loads(file.metadata()["kvnotes"])["token_ids"] == list(segment.run.token_ids)


def test_the_safetensors_library_reads_levels_and_scales_of_int8(tmp_path: Path) -> None:
    save_segment(tmp_path / NAME, segment_of(5, head_dim=4), int8=True)
    found = load_file(tmp_path / NAME)
    assert found["keys.0"].dtype == torch.int8 and found["keys.0.scale"].dtype == torch.float16
    loaded = load_segment(tmp_path / NAME)
    assert torch.equal(found["keys.0"].float() * found["keys.0.scale"].float(), loaded.keys[0])


def test_a_safetensors_file_of_somebody_else_is_called_that(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        save_file({"keys.0": torch.ones(1, 3, 2)}, tmp_path / NAME, metadata)
        assert "safetensors file without a kvnotes header" in refusal(tmp_path / NAME)


def test_a_file_that_the_library_wrote_again_is_refused(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, metadata)
    assert "no multiple of 4096" in refusal(path)


def test_canonical_text_of_the_helper_is_that_of_the_file(path: Path) -> None:
    """The helper's own JSON changes nothing: a file rewritten without a change still loads."""
    rewritten(path, lambda content: with_header(content, lambda data: None))
    assert facts_of(load_segment(path)) == facts_of(segment_of(3, 2))
    assert canonical({"b": 1, "a": "\u00e9"}) == '{"a":"\\u00e9","b":1}'


# -- what is no file -----------------------------------------------------------------------


def test_a_symbolic_link_is_refused_also_to_a_good_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    assert "it is a symbolic link" in refusal(link)
    link.unlink()
    link.symlink_to("nowhere")
    assert "it is a symbolic link" in refusal(link)


def test_a_folder_a_device_and_a_socket_are_refused(tmp_path: Path) -> None:
    assert "no regular file" in refusal(tmp_path)
    for device in ("/dev/null", "/dev/zero"):
        assert "no regular file" in refusal(Path(device))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert "cannot open" in refusal(tmp_path / "socket")


def test_a_fifo_is_refused_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    def late(*arguments: object) -> None:
        raise AssertionError("still waiting for somebody to write into it")

    os.mkfifo(tmp_path / "fifo")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        assert "no regular file" in refusal(tmp_path / "fifo")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name", ["none", "a\0b", "..", "../", "x/../none", "n" * 300, "\x1b[31m\n"]
)
def test_a_name_without_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SegmentFormatError):
        load_segment(tmp_path / name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    assert "has 0 bytes, too few" in refusal(tmp_path / NAME)


def test_what_the_system_cannot_do_now_is_no_fault_of_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a store puts damaged files aside: it must not do that for want of permission
    def fails(*arguments: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("open", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(StorageError, match=r"cannot read .*: Input/output error"):
                open_segment(path)
    assert open_segment(path).header


def test_too_many_open_files_are_no_fault_of_the_file(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 300), limits[1]))
        with pytest.raises(StorageError, match="Too many open files"):
            for _ in range(400):
                held.append(open_segment(path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -- what is another file than it says -----------------------------------------------------


def test_claimed_elements_cost_no_memory(path: Path) -> None:
    def claim(content: bytes) -> bytes:
        outer, data = taken_apart(content)
        outer["keys.0"] |= {"shape": [10**4, 10**4, 10**4], "data_offsets": [0, 4 * 10**12]}
        return joined(outer, data)

    rewritten(path, claim)
    tracemalloc.start()
    try:
        assert "takes 4000000000000 bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o["__metadata__"].pop("sha256"), "header whose SHA-256 is another one"),
        (lambda o: o["__metadata__"].update(sha256="0" * 64), "whose SHA-256 is another one"),
        (lambda o: o["__metadata__"].update(note="x"), "has a text 'note' too much"),
        (lambda o: o["__metadata__"].pop("kvnotes"), "without a kvnotes header"),
        (lambda o: o.pop("__metadata__"), "without a kvnotes header"),
        (lambda o: o["__metadata__"].update(sealed="{}"), "is encrypted, and holds 2 tensors"),
        (lambda o: o.update({"more": o.pop("keys.0")}), "other tensors than its header describes"),
        (lambda o: o["keys.0"].update(shape=[3, 1, 2]), "other tensors than its header describes"),
        (lambda o: o["keys.0"].update(dtype="BF16", shape=[1, 3, 4]), "other tensors than its"),
        (
            lambda o: o.update({"keys.0": o["values.0"], "values.0": o["keys.0"]}),
            "other tensors than its header describes: 2, not 2, or in another order",
        ),
    ],
)
def test_an_outer_form_that_does_not_fit_the_header_is_refused(
    path: Path, change: Callable[[Any], object], message: str
) -> None:
    def edit(content: bytes) -> bytes:
        outer, data = taken_apart(content)
        change(outer)
        return joined(outer, data)

    assert message in refusal(rewritten(path, edit))


@pytest.mark.parametrize("first", [4096 + 4, 4096 + 8, 4096 + 2048, 4096 + 2])
def test_tensors_that_begin_on_no_page_are_refused(path: Path, first: int) -> None:
    outer, data = taken_apart(path.read_bytes())
    text = json.dumps(outer).ljust(first - 8)
    path.write_bytes(joined(text, data, page=1))
    message = "no multiple of 4096" if first % 4 == 0 else "no multiple of its item size"
    assert message in refusal(path)


@pytest.mark.parametrize(
    "text", ["", "{}", "\ud800", "[" * 100_000, '{"version":2}', "\x00", "\u2028"]
)
def test_an_inner_header_that_is_none_is_refused(path: Path, text: str) -> None:
    rewritten(path, lambda content: with_text(content, text))
    assert refusal(path)


def test_a_newer_version_is_called_that(path: Path) -> None:
    rewritten(path, lambda content: with_header(content, at("version", 2)))
    assert "format version 2, this kvnotes reads 1" in refusal(path)


def test_a_file_with_changed_facts_holds_another_segment(path: Path) -> None:
    key = open_segment(path).header.key
    rewritten(path, lambda content: with_header(content, at("tenant", "other")))
    assert open_segment(path).header.key != key


def test_a_renamed_or_swapped_file_says_which_segment_it_holds(tmp_path: Path) -> None:
    headers = {}
    for index in range(2):
        segment = segment_of(3 + index)
        headers[index] = save_segment(tmp_path / str(index), segment)
    (tmp_path / "0").rename(tmp_path / "swap")
    (tmp_path / "1").rename(tmp_path / "0")
    (tmp_path / "swap").rename(tmp_path / "1")
    assert open_segment(tmp_path / "0").header.key == headers[1].key
    assert open_segment(tmp_path / "1").header.key == headers[0].key


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_that_are_not_finite_are_refused_although_their_digest_fits(
    tmp_path: Path, value: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = segment_of(3, dtype=dtype)
    segment.values[0][0, 1, 1] = value
    with pytest.raises(SegmentFormatError, match=r"values\.0 holds NaN or infinity"):
        save_segment(tmp_path / NAME, segment)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        saving, "checked_digest", lambda name, t: hashlib.sha256(raw_bytes(t)).hexdigest()
    )
    save_segment(tmp_path / NAME, segment)
    assert "tensor 'values.0' holds NaN or infinity" in refusal(tmp_path / NAME)


def test_a_part_of_a_session_is_no_segment(tmp_path: Path) -> None:
    segment = segment_of(3)
    run = Run(segment.run.token_ids, 2, Run((1, 2)).whole().run.after)
    part = KVSegment(run, segment.identity, segment.tensors)
    save_segment(tmp_path / NAME, part, kind="run")
    assert "part of a saved session, not a compiled segment" in refusal(tmp_path / NAME)
    opened = open_segment(tmp_path / NAME)
    with pytest.raises(SegmentFormatError, match="says by digest only"):
        opened.segment()
    assert facts_of(opened.segment(run)) == facts_of(part)


# -- verified once, mapped -----------------------------------------------------------------


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were hashed."""
    hashed: list[str] = []
    real = opening.checked_digest

    def counted(name: str, tensor: torch.Tensor) -> str:
        hashed.append(name)
        return real(name, tensor)

    monkeypatch.setattr(opening, "checked_digest", counted)
    return hashed


def test_a_file_is_verified_once_per_version_and_process(path: Path, digests: list[str]) -> None:
    seen = VerifiedFiles()
    for _ in range(3):
        load_segment(path, seen=seen)
    assert len(digests) == 2
    load_segment(path, seen=VerifiedFiles())
    assert len(digests) == 4
    load_segment(path)
    assert len(digests) == 6
    save_segment(path, segment_of(3, 2))  # the same segment, another file
    load_segment(path, seen=seen)
    assert len(digests) == 8


def test_a_file_that_failed_is_not_remembered(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    seen = VerifiedFiles()
    for _ in range(2):
        with pytest.raises(SegmentFormatError, match=r"tensor 'values\.0' is damaged"):
            load_segment(path, seen=seen)


def test_a_file_changed_in_place_is_verified_again_also_with_its_old_time(path: Path) -> None:
    seen = VerifiedFiles()
    load_segment(path, seen=seen)
    facts, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(SegmentFormatError, match="is damaged"):
        load_segment(path, seen=seen)


def test_a_file_that_is_replaced_stays_as_it_was_for_whoever_has_it(path: Path) -> None:
    seen = VerifiedFiles()
    old = load_segment(path, seen=seen)
    before, other = facts_of(old), segment_of(3, 2, seed=1)
    save_segment(path, other)
    assert facts_of(old) == before
    assert facts_of(load_segment(path, seen=seen)) == facts_of(other) != before
    path.unlink()
    assert facts_of(old) == before


def test_a_file_that_shrinks_while_it_is_opened_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread

    def cut_off(file: int, size: int, offset: int) -> bytes:
        content = real(file, size, offset)
        if offset:
            os.truncate(path, 4096)
        return content

    monkeypatch.setattr(os, "pread", cut_off)
    assert "is being changed" in refusal(path)


def test_exact_kv_are_views_of_the_mapped_file(path: Path) -> None:
    opened = open_segment(path)
    first, second = opened.segment(), opened.segment()
    for one, other in zip(first.keys + first.values, second.keys + second.values, strict=True):
        assert one.data_ptr() == other.data_ptr()
        assert one.data_ptr() % one.element_size() == 0
    assert first.keys[0].data_ptr() % 4096 == 0


def test_a_segment_outlives_its_file_and_whoever_opened_it(path: Path) -> None:
    segment = load_segment(path)
    path.unlink()
    assert facts_of(segment) == facts_of(segment_of(3, 2))
