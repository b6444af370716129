"""The commands of store and library on the embedded model, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvnotes.cli.main import main
from kvnotes.errors import (
    PlanError,
    SegmentFormatError,
    SpecMismatchError,
    StorageError,
    TemplateError,
    TrustError,
    UnknownSegmentError,
)
from kvnotes.session import Model, load
from kvnotes.store import SUFFIX, KVStore

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SKILLS = str(ROOT / "examples" / "skills")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> Model:
    return load(str(smollm2_path))


@pytest.fixture
def run(
    loaded: Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs a command in this process, on a model that is loaded once for all of them."""

    def loader(name: str, *, dtype: str | None = None, store: Any = None) -> Model:
        return Model(loaded.engine, loaded.tokenizer, loaded.name, store or KVStore())

    monkeypatch.setattr("kvnotes.session.load", loader)

    def call(*args: str, store: str = "store") -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([*args, "--store", str(tmp_path / store)])
        out, err = capsys.readouterr()
        return Done(int(stopped.value.code or 0), out, err)

    return call


def compiled_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def test_dry_run_shows_the_cost_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    done = run("compile", SKILLS, "--dry-run")
    assert done.code == 0 and "would compile 6 segments" in done.out
    assert "shipping@1" in done.out and "0/2" in done.out
    assert not (tmp_path / "store").exists() or compiled_files(tmp_path / "store") == []


def test_compile_is_incremental_and_says_so(run: Run, tmp_path: Path) -> None:
    first = run("compile", SKILLS, "--json").json
    assert first["compiled"] == 6 and first["elapsed_ms"] > 0
    assert len(compiled_files(tmp_path / "store")) == 6
    second = run("compile", SKILLS)
    assert "everything is compiled already" in second.out
    assert second.err == ""


def test_library_is_listed_shown_pinned_and_removed(run: Run) -> None:
    run("compile", SKILLS)
    listed = run("library", "ls", "--json").json["skills"]
    assert [skill["ref"] for skill in listed] == [
        "base@1",
        "refunds@1",
        "shipping@1",
        "tool/cancel_order@1",
        "tool/get_order@1",
    ]
    assert {s["variant"] for s in listed[2]["segments"]} == {"tier=gold", "tier=standard"}
    shown = run("library", "show", "shipping")
    assert "Gold customers get express delivery" in shown.out and "tier=gold" in shown.out
    assert run("library", "pin", "shipping", "--json").json["skills"][0]["pinned"]
    would = run("prune", "--max-size", "1", "--dry-run", "--json").json
    assert len(would["files"]) == 4, "the pinned family stays"
    assert "removed shipping@1: 2 segments" in run("library", "rm", "shipping").out
    missing = run("library", "show", "shipping")
    assert missing.code == UnknownSegmentError.exit_code and missing.out == ""


def test_file_is_inspected_and_verified(run: Run, tmp_path: Path) -> None:
    run("compile", SKILLS)
    record = run("inspect", "refunds", "--json").json[0]
    assert record["name"] == "refunds" and record["exact"] and record["encrypted"] is False
    assert record["preamble_tokens"] > 0 and "may return an unused article" in record["text"]
    path = Path(record["path"])
    assert "tokens" in run("inspect", str(path)).out
    verified = run("verify", "all", "--json").json
    assert verified["ok"] and len(verified["files"]) == 6
    again = run("verify", "refunds", "--recompute", "--json").json["files"][0]
    assert again["text_agrees"] and again["recomputed"]["agreed"]
    assert again["recomputed"]["checked_tokens"] == again["recomputed"]["tokens"]
    sampled = run("verify", "refunds", "--share", "0.2", "--json").json["files"][0]["recomputed"]
    assert sampled["checked_tokens"] < sampled["tokens"] and sampled["max_gap"] < 1e-5


def test_damaged_file_fails_with_the_code_of_its_error(run: Run, tmp_path: Path) -> None:
    run("compile", SKILLS)
    path = compiled_files(tmp_path / "store")[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    done = run("verify", str(path))
    assert done.code == SegmentFormatError.exit_code
    assert "FAILED" in done.out and "is damaged: its SHA-256 begins with" in done.err
    swapped = compiled_files(tmp_path / "store")
    swapped[1].rename(swapped[2])
    done = run("verify", str(swapped[2]))
    assert done.code == SegmentFormatError.exit_code and "not that of its name" in done.err


def test_file_whose_values_are_not_those_of_its_text_is_found(
    run: Run, loaded: Model, tmp_path: Path
) -> None:
    from kvnotes.segment import KVSegment
    from kvnotes.store import save_segment

    honest = loaded.engine.compile(tuple(range(100, 160)))
    other = loaded.engine.compile(tuple(range(101, 161)))
    path = tmp_path / f"foreign{SUFFIX}"
    mixed = {"keys": honest.keys, "values": other.values}
    save_segment(path, KVSegment(honest.run, honest.identity, mixed))
    assert run("verify", str(path)).code == 0
    done = run("verify", str(path), "--recompute")
    assert done.code == SegmentFormatError.exit_code
    assert "its K/V are not those of its tokens" in done.err


def test_skill_is_pushed_and_pulled(run: Run, tmp_path: Path) -> None:
    run("compile", SKILLS)
    remote = ("--remote", str(tmp_path / "remote"))
    assert run("library", "push", "refunds", "base").code == StorageError.exit_code
    assert "would push" in run("library", "push", "refunds", *remote, "--dry-run").out
    assert not (tmp_path / "remote").exists()
    assert "pushed refunds@1: 1 segment" in run("library", "push", "refunds", *remote).out
    pulled = run("library", "pull", "refunds", *remote, "--json", store="other").json
    assert pulled["skills"][0]["ref"] == "refunds@1"
    assert len(compiled_files(tmp_path / "other")) == 1
    done = run("library", "pull", "shipping", *remote, store="other")
    assert done.code == UnknownSegmentError.exit_code and "has no skill 'shipping'" in done.err


def test_int8_copy_states_its_error_and_agrees_within_it(run: Run) -> None:
    run("compile", SKILLS, "--int8")
    record = run("inspect", "refunds", "--json").json[0]
    assert record["payload"] == "int8" and not record["exact"]
    assert 0 < record["max_error"] < 0.01 and 0 < record["rms_error"] < 0.02
    assert run("verify", "refunds", "--recompute").code == 0


def test_signed_and_encrypted_store(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "other"):
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem"],
            check=True,
            capture_output=True,
        )
        command = ["openssl", "pkey", "-in", tmp_path / f"{name}.pem", "-pubout"]
        subprocess.run([*command, "-out", tmp_path / f"{name}.pub"], check=True)
    (tmp_path / "key.hex").write_text("ab" * 32)
    monkeypatch.setenv("KVNOTES_SIGNING_KEY", str(tmp_path / "mine.pem"))
    monkeypatch.setenv("KVNOTES_ENCRYPTION_KEY", str(tmp_path / "key.hex"))
    run("compile", SKILLS)
    content = b"".join(
        path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()
    )
    assert b"unused article" not in content, "no file beside the segments holds the text"
    record = run("inspect", "refunds", "--json").json[0]
    assert record["encrypted"] and record["signer"]
    monkeypatch.setenv("KVNOTES_TRUSTED_KEYS", str(tmp_path / "other.pub"))
    done = run("verify", "refunds")
    assert done.code == TrustError.exit_code and "trusted keys is needed" in done.err
    monkeypatch.setenv("KVNOTES_TRUSTED_KEYS", str(tmp_path / "mine.pub"))
    assert run("verify", "refunds").code == 0
    monkeypatch.delenv("KVNOTES_ENCRYPTION_KEY")
    assert run("verify", "all").code == TrustError.exit_code


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("compile", "nowhere"), TemplateError.exit_code, "there is no folder nowhere"),
        (("inspect", "nothing"), UnknownSegmentError.exit_code, "no skill 'nothing'"),
        (("inspect", "0123456789abcdef"), UnknownSegmentError.exit_code, "0 segments have a key"),
        (("inspect", f"none{SUFFIX}"), SegmentFormatError.exit_code, "cannot open"),
        (("library", "show", "a@b"), TemplateError.exit_code, "names no skill"),
        (("prune", "--max-size", "much"), 4, "is no size"),
        (("prune", "--keep-model", "abc"), 4, "0 models here"),
        (("library", "nope"), 2, "No such command"),
    ],
)
def test_fault_has_its_code_and_a_hint(
    run: Run, args: tuple[str, ...], code: int, says: str
) -> None:
    done = run(*args)
    assert done.code == code and says in done.err
    assert done.out == "" and "hint:" in done.err and "Traceback" not in done.err


def test_conversation_goes_on_after_the_process_has_ended(
    smollm2_path: Path, tmp_path: Path
) -> None:
    def chat(lines: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvnotes.cli.main", "chat", "--threads", "1"]
        options = ["--model", str(smollm2_path), "--store", str(tmp_path), "--max-new-tokens", "6"]
        return subprocess.run(
            [*command, *options, *args],
            input=lines,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=300,
        )

    first = chat(
        "Hello\n/save talk\n", "--system", "You serve {{who}}.", "--field", "who=customers"
    )
    assert first.returncode == 0 and "--resume talk" in first.stderr
    second = chat("And now?\n", "--resume", "talk", "--json")
    assert second.returncode == 0, second.stderr
    tokens = json.loads(second.stdout)["turn"]["tokens"]
    assert tokens["computed"] < 20 < tokens["reused"]
    other = chat("x\n", "--resume", "talk", "--dtype", "bfloat16")
    assert other.returncode == SpecMismatchError.exit_code
    assert "dtype: float32, here bfloat16" in other.stderr


def test_refused_compile_gives_no_version(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "skills"
    folder.mkdir()
    manifest = folder / "kvnotes.toml"
    text = '[skills.terms]\ntext = "Terms hold."\npreamble = "{{a}}"\n[skills.terms.variants]\na = '
    manifest.write_text(text + str([str(n) for n in range(9)]).replace("'", '"'))
    refused = run("compile", str(folder), "--max-variants", "8")
    assert refused.code == PlanError.exit_code and "a(9) = 9 variants" in refused.err
    manifest.write_text(text + '["1"]')
    assert run("compile", str(folder), "--json").json["skills"][0]["ref"] == "terms@1"


def test_listing_of_a_tenant_counts_its_own_segments_only(run: Run) -> None:
    run("compile", SKILLS)
    listed = run("library", "ls", "--tenant", "acme", "--json").json
    assert listed == {"skills": [], "other_segments": []}
