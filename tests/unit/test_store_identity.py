"""What decides the key of a segment, and who computed it: each part of both counts."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from helpers_store import (
    HALF,
    PLAIN,
    SOURCE,
    TEXT_OF_HEADER,
    at,
    canonical,
    changed,
    header,
    identity,
    leaves,
    of_model,
    segment_of,
)
from pydantic import TypeAdapter

from kvnotes.errors import SegmentFormatError, SpecMismatchError
from kvnotes.spec import ModelIdentity
from kvnotes.store.header import Creation, SegmentHeader, make_header


def refusal(text: str) -> str:
    with pytest.raises(SegmentFormatError) as caught:
        SegmentHeader.from_json(text, "f")
    return caught.value.message


def test_the_key_follows_from_the_header_alone() -> None:
    data = json.loads(TEXT_OF_HEADER)
    numbers = [data["start"], *data["token_ids"]]
    run = hashlib.sha256(data["attended"].encode() + struct.pack("<4q", *numbers)).hexdigest()
    text = canonical(["kvnotes", 1, data["kind"], data["tenant"], data["fingerprint"], run])
    assert header().key == hashlib.sha256(text.encode()).hexdigest()


def test_what_decides_the_kv_decides_the_key() -> None:
    headers = [
        make_header(segment_of(3, 2), **PLAIN),
        make_header(segment_of(3, 1), **PLAIN),
        make_header(segment_of(3, 0), **PLAIN),
        make_header(segment_of(4, 2), **PLAIN),
        make_header(segment_of(3, 2, head_dim=4), **PLAIN),
        make_header(segment_of(3, 2, dtype="float16"), **{**PLAIN, "payload": HALF}),
        make_header(segment_of(3, 2), **{**PLAIN, "tenant": "b"}),
        make_header(segment_of(3, 0), **{**PLAIN, "kind": "run"}),
    ]
    assert len({one.key for one in headers}) == len(headers)


def test_what_does_not_decide_the_kv_does_not_decide_the_key() -> None:
    plain = make_header(segment_of(3, 2), **PLAIN)
    for change in ({"provenance": SOURCE}, {"created": Creation.now()}):
        assert make_header(segment_of(3, 2), **{**PLAIN, **change}).key == plain.key


def test_the_fingerprint_follows_from_the_identity_alone() -> None:
    assert of_model() == TEXT_OF_HEADER


# -- another model -------------------------------------------------------------------------


def perturbed(value: Any) -> Any:
    if isinstance(value, str):
        known = {"full": "sliding", "half": "interleaved", "keys": "values"}
        return known.get(value, value + "x")
    if value is None or isinstance(value, bool):
        return 1 if value is None else not value
    return value + 1


def identity_leaves() -> list[str]:
    paths = [path for path, _ in leaves(json.loads(TEXT_OF_HEADER)["identity"])]
    return [path for path in paths if path not in NO_IDENTITY]


NO_IDENTITY = ("spec.num_parameters", "spec.limit_reason")


@pytest.mark.parametrize("path", identity_leaves())
def test_each_field_of_the_identity_is_compared_and_named(path: str) -> None:
    data = json.loads(TEXT_OF_HEADER)
    at("identity." + path, perturbed(dict(leaves(data["identity"]))[path]))(data)
    assert "fingerprint" in refusal(canonical(data)), "the header still has the old one"
    with pytest.raises(SpecMismatchError) as caught:
        identity().check_same(_identity(data["identity"]), "the segment")
    name = path.removeprefix("spec.").replace("weights_digest", "weights")
    parts = [f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")]
    assert f"({''.join(parts).lstrip('.')}: " in caught.value.message


def _identity(data: dict[str, Any]) -> Any:
    """The identity that a header describes."""
    return TypeAdapter(ModelIdentity).validate_json(json.dumps(data))


def test_estimates_and_reasons_are_no_part_of_the_identity() -> None:
    data = json.loads(TEXT_OF_HEADER)["identity"]
    data["spec"]["num_parameters"] += 1
    data["spec"]["limit_reason"] = "its tables change"
    identity().check_same(_identity(data), "the segment")


def test_every_leaf_of_a_header_is_checked_kept_or_part_of_the_key() -> None:
    """A changed value is refused, or is read as it is written, and never silently repaired."""
    kept = set()
    for path, value in leaves(json.loads(TEXT_OF_HEADER)):
        new = [] if value == [] else perturbed(value)
        if path.endswith("sha256") or path in ("attended", "fingerprint"):
            new = "c" * 64
        text = changed(at(path, new))
        try:
            found = SegmentHeader.from_json(text, "f")
        except SegmentFormatError:
            continue
        if text != TEXT_OF_HEADER:
            assert found.to_json() == text
            kept.add(path)
    assert kept == {
        "created.versions.0.0",
        "created.versions.0.1",
        "created.versions.1.0",
        "created.versions.1.1",
        "identity.spec.limit_reason",
        "identity.spec.num_parameters",
        "provenance.name",
        "provenance.role",
        "provenance.spans.0.name",
        "provenance.spans.0.start",
        "provenance.spans.0.stop",
        "provenance.spans.0.value",
        "provenance.tokenizer",
        "provenance.variant.0.0",
        "provenance.variant.0.1",
        "provenance.version",
        "tenant",
        "tensors.0.sha256",
        "tensors.1.sha256",
        "token_ids.0",
        "token_ids.1",
        "token_ids.2",
    }
