"""docs/format.md and docs/security.md say what the code does; their commands run.

Their Python is run by test_pages.py, like that of all pages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from kvnotes.settings import load_settings
from kvnotes.spec import ModelSpec, RopeSpec
from kvnotes.store import Trust, container, untrusted
from kvnotes.store.header import (
    DTYPE_CODES,
    FORMAT_VERSION,
    MAX_TEXT,
    MAX_TOKENS,
    Creation,
    FieldSpan,
    Payload,
    Provenance,
    SegmentHeader,
    TensorEntry,
    canonical_json,
)
from kvnotes.store.trust import CHUNK

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMAT = (DOCS / "format.md").read_text(encoding="utf-8")
SECURITY = (DOCS / "security.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"^#+ ", FORMAT.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def names(title: str) -> set[str]:
    return {name for row in rows(title) for name in re.findall(r"`([^`]+)`", row[0])}


# -- the format ----------------------------------------------------------------------------


def example() -> dict[str, object]:
    found: dict[str, object] = json.loads(FORMAT.split("```json\n")[1].split("```")[0])
    return found


def test_the_example_is_a_header_with_the_digests_that_the_page_computes() -> None:
    header = SegmentHeader.from_json(canonical_json(example()), "docs/format.md")
    printed = section("Worked example").split("```\n")[-2].split()
    text = header.to_json()
    assert printed == [
        str(len(text)),
        sha256(text.encode()).hexdigest(),
        "True",
        "True",
        header.run_digest,
        header.key,
        "True",
    ]
    numbers = ((1, -2, 0.5, 0.25, 3, 0), (0, 1, 2, -1, 0.125, 4))
    for tensor, values in zip(header.tensors, numbers, strict=True):
        assert tensor.sha256 == sha256(struct.pack("<6f", *values)).hexdigest()
    assert "`[[[1, -2], [0.5, 0.25], [3, 0]]]`" in FORMAT


def test_the_tables_name_all_keys_and_no_others() -> None:
    assert names("Header") == set(SegmentHeader.model_fields)
    assert names("Provenance") == set(Provenance.model_fields)
    spec = {f"spec.{name}" for name in ModelSpec.__dataclass_fields__}
    identity = {"weights_digest", "adapter", "quantization"}
    assert names("Identity and fingerprint") == spec | identity
    for rope in RopeSpec.__dataclass_fields__:
        assert f"`{rope}`" in section("Identity and fingerprint")
    for part in (Creation, FieldSpan, TensorEntry):
        row = next(line for line in FORMAT.splitlines() if line.startswith(f"| `{_KEY[part]}`"))
        for name in set(part.model_fields) - {"start", "stop"}:
            assert f"`{name}`" in row
    for name in Payload.model_fields:
        assert f"`{name}`" in section("Payload") or name == "kind"


_KEY = {Creation: "created", FieldSpan: "spans", TensorEntry: "tensors"}


def test_the_table_of_payloads_is_that_of_the_code() -> None:
    kinds = Payload.model_fields["kind"].annotation
    assert names("Payload") == set(kinds.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "title"),
    [
        (container.MAX_HEADER_NBYTES, "Outer form"),
        (container.PAGE, "Outer form"),
        (container.MAX_TENSORS, "Outer form"),
        (MAX_TOKENS, "Header"),
        (MAX_TEXT, "Header"),
        (untrusted.MAX_BRACKETS, "What a reader checks, in this order"),
        (untrusted.MAX_VALUES, "What a reader checks, in this order"),
        (CHUNK, "Sealed files"),
    ],
)
def test_the_page_states_the_limits_of_the_code(value: int, title: str) -> None:
    assert f"{value:,}" in section(title)


def test_the_page_states_the_version_and_the_dtypes_of_the_code() -> None:
    assert f"format version {FORMAT_VERSION}," in FORMAT
    assert all(f"`{name}`" in section("Identity and fingerprint") for name in DTYPE_CODES)
    assert all(f"`{code}`" in section("Outer form") for code in container.ITEMSIZE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": [2], "a": 1}, '{"a":1,"b":[2]}'),
        ('"\\/', r'"\"\\/"'),
        ("\b\t\n\f\r\x00\x1f\x7f", r'"\b\t\n\f\r\u0000\u001f\u007f"'),
        ("\x80\u20ac\U0001f600", r'"\u0080\u20ac\ud83d\ude00"'),
        (
            [1e-4, 1e-5, 1.5e-7, 1e15, 1e16, 0.1],
            "[0.0001,1e-05,1.5e-07,1000000000000000.0,1e+16,0.1]",
        ),
        ([-0.0, 3.0, 10**20], "[-0.0,3.0,100000000000000000000]"),
    ],
)
def test_canonical_json_is_what_the_page_says(value: object, text: str) -> None:
    assert canonical_json(value) == text


# -- the commands --------------------------------------------------------------------------

COMMANDS = re.findall(r"```sh\n(.*?)```", SECURITY, re.DOTALL)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_commands_make_keys_that_kvnotes_takes(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(["set -eu", *COMMANDS, 'env | grep "^KVNOTES_"'])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    environ = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert environ.keys() == {
        "KVNOTES_ENCRYPTION_KEY",
        "KVNOTES_SIGNING_KEY",
        "KVNOTES_TRUSTED_KEYS",
    }
    trust = Trust.from_settings(load_settings(environ))
    assert trust.signing_key and trust.encryption_key and len(trust.trusted) == 1
    signature = trust.sign("header")
    assert trust.check("header", signature, "f") == trust.trusted[0].hex()
    for name in ("kv.key", "sign.pem"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    other = Trust.from_files(
        signing_key=tmp_path / "sign2.pem", trusted=[tmp_path / "sign2.pub", tmp_path / "sign.pub"]
    )
    assert other.check("header", other.sign("header"), "f") == other.trusted[0].hex()


def test_the_key_that_python_makes_is_one(tmp_path: Path) -> None:
    command = re.search(r"`python (-c '.*?') > kv\.key`", SECURITY)
    assert command
    done = subprocess.run(
        f"{sys.executable} {command[1]} > kv.key", shell=True, cwd=tmp_path, check=True
    )
    assert done.returncode == 0
    assert Trust.from_files(encryption_key=tmp_path / "kv.key").encryption_key


def test_the_page_names_the_settings_and_no_others() -> None:
    settings = (DOCS.parent / "kvnotes" / "settings.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"(KVNOTES_\w+)"', settings))
    named = set(re.findall(r"KVNOTES_\w+", SECURITY))
    assert named <= known
    assert {name for name in known if name.endswith(("KEY", "KEYS"))} <= named
