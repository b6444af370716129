"""`kvnotes doctor`: every fault provoked, with its exit code and its way out."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import transformers as tf
from helpers_models import MODELS, SHAPE, sharpen
from helpers_prompt import FAMILIES, family_tokenizer

from kvnotes.cli import doctor, doctor_model
from kvnotes.cli.doctor_records import Check
from kvnotes.cli.main import main
from kvnotes.engine.quiet import quiet_transformers
from kvnotes.errors import (
    EngineError,
    ModelNotFoundError,
    SegmentFormatError,
    StorageError,
    TemplateError,
    UnsupportedModelError,
)
from kvnotes.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
GPT2 = {"vocab_size": 600, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}

Memory = namedtuple("Memory", ["total", "available"])
Disk = namedtuple("Disk", ["total", "used", "free"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("KVNOTES_HOME", str(folder))
    return folder


@pytest.fixture
def diagnose(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run `kvnotes doctor --json`; the exit code must be the record's."""

    def call(*args: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stop:
            main(["doctor", *args, "--json"])
        said = capsys.readouterr()
        assert said.err == ""
        record: dict[str, Any] = json.loads(said.out)
        schema = json.loads((DOCS / "doctor.schema.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(schema).validate(record)
        assert stop.value.code == record["exit_code"]
        faults = [check for check in record["checks"] if check["status"] == "fault"]
        assert record["usable"] == (not faults)
        assert record["exit_code"] == (faults[0]["exit_code"] if faults else 0)
        assert all(check["way_out"] for check in record["checks"] if check["status"] != "ok")
        return record

    return call


def line(record: dict[str, Any], name: str, section: str = "environment") -> dict[str, Any]:
    found = [c for c in record["checks"] if (c["section"], c["name"]) == (section, name)]
    assert len(found) == 1, (name, [c["name"] for c in record["checks"]])
    return found[0]


def faults(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [(c["name"], c["error"]) for c in record["checks"] if c["status"] == "fault"]


def names(record: dict[str, Any], section: str) -> list[str]:
    return [check["name"] for check in record["checks"] if check["section"] == section]


# -- the environment ---------------------------------------------------------------------------


def test_environment_alone_is_checked_without_a_model(diagnose: Any) -> None:
    record = diagnose("--no-model")
    assert record["usable"] and record["model"] is None
    assert names(record, "model") == []
    for name in ("python", "platform", "kvnotes", "threads", "memory", "disk", "privacy"):
        assert line(record, name)["status"] in ("ok", "warning"), name
    for name in ("torch", "transformers", "tokenizers", "safetensors"):
        fact = line(record, name)["fact"]
        assert fact.startswith(version(name)) and "needs " in fact
    for name in ("aiohttp", "cryptography", "matplotlib"):
        assert "optional: " in line(record, name)["fact"]


def versions_with(monkeypatch: pytest.MonkeyPatch, name: str, found: str | None) -> None:
    """Let the metadata of one distribution say something else, or be missing."""

    def fake(distribution: str) -> str:
        if distribution != name:
            return version(distribution)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", fake)


@pytest.mark.parametrize("found", ["4.44.0", "5.18.9", "5.25.0", "6.0.0"])
def test_wrong_version_is_a_fault_and_the_model_is_left_alone(
    found: str, diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_with(monkeypatch, "transformers", found)
    record = diagnose()
    assert faults(record) == [("transformers", "EngineError")]
    check = line(record, "transformers")
    assert check["fact"].startswith(f"{found} is installed, needs ")
    assert "5.19" in check["fact"] and "5.25" in check["fact"]
    assert check["way_out"].startswith('pip install "transformers')
    assert record["exit_code"] == EngineError.exit_code
    skipped = line(record, "model", "model")
    assert (skipped["status"], skipped["fact"]) == ("warning", "not checked: see transformers")
    assert line(record, "matplotlib"), "the rest of the checklist is there"


@pytest.mark.parametrize("name", ["tokenizers", "pyyaml"])
def test_missing_package_is_a_fault_whichever_it_is(
    name: str, diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_with(monkeypatch, name, None)
    record = diagnose("--no-model")
    assert faults(record) == [(name, "EngineError")]
    assert line(record, name)["fact"].startswith("not installed, needs ")


def test_development_version_inside_the_range_is_fine(
    diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_with(monkeypatch, "transformers", "5.20.0.dev0")
    assert diagnose("--no-model")["usable"]


def test_optional_package_that_is_missing_is_no_complaint(
    diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_with(monkeypatch, "matplotlib", None)
    check = line(diagnose("--no-model"), "matplotlib")
    assert (check["status"], check["way_out"]) == ("ok", 'pip install "kvnotes[plots]"')


def test_source_tree_that_is_not_installed_is_a_warning(
    diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", missing)
    monkeypatch.setattr(doctor, "metadata", missing)
    record = diagnose("--no-model")
    assert record["usable"]
    assert line(record, "kvnotes")["status"] == "warning"


def test_old_python_is_a_fault(diagnose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.18")
    record = diagnose("--no-model")
    assert faults(record) == [("python", "EngineError")]
    assert ">=3.10" in line(record, "python")["fact"]


def test_folder_below_a_file_cannot_be_made(
    diagnose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below/it"):
        monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / place))
        record = diagnose("--no-model")
        assert faults(record) == [("KVNOTES_HOME", "StorageError")]
        assert record["exit_code"] == StorageError.exit_code
        assert str(tmp_path / "file") in line(record, "KVNOTES_HOME")["fact"]


def test_first_of_two_faults_gives_the_exit_code(
    diagnose: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("KVNOTES_HOME", str(home / "file"))
    versions_with(monkeypatch, "torch", "1.13.0")
    record = diagnose("--no-model")
    assert faults(record) == [("torch", "EngineError"), ("KVNOTES_HOME", "StorageError")]
    assert record["exit_code"] == EngineError.exit_code != StorageError.exit_code


def test_folder_that_cannot_be_written_is_a_fault(
    diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuses)
    record = diagnose("--no-model")
    assert faults(record) == [("KVNOTES_HOME", "StorageError")]
    assert line(record, "KVNOTES_HOME")["fact"].endswith("cannot be written: Read-only file system")


def test_folder_that_cannot_be_made_is_a_fault(
    diagnose: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVNOTES_HOME", str(home / "new" / "er"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    record = diagnose("--no-model")
    assert faults(record) == [("KVNOTES_HOME", "StorageError")]


def test_folder_that_is_not_there_yet_is_fine_and_is_not_made(
    diagnose: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVNOTES_HOME", str(home / "new" / "er"))
    record = diagnose("--no-model")
    assert line(record, "KVNOTES_HOME")["fact"].endswith("will be made")
    assert "privacy" not in names(record, "environment")
    assert list(home.iterdir()) == []


def test_checking_leaves_nothing_in_the_folder(diagnose: Any, home: Path) -> None:
    diagnose("--no-model")
    assert list(home.iterdir()) == []


def test_full_disk_is_a_warning(diagnose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Disk(10**9, 9 * 10**8, 10**8))
    check = line(diagnose("--no-model"), "disk")
    assert (check["status"], check["fact"]) == ("warning", "100 MB free")


def test_folder_that_others_can_read_is_a_warning_unless_the_store_is_private(
    diagnose: Any, home: Path
) -> None:
    assert line(diagnose("--no-model"), "privacy")["status"] == "ok"
    home.chmod(0o755)
    check = line(diagnose("--no-model"), "privacy")
    assert (check["status"], check["way_out"]) == ("warning", f"chmod 700 {home}")
    Settings(home).store.mkdir(mode=0o700)
    assert line(diagnose("--no-model"), "privacy")["status"] == "ok"


@pytest.mark.parametrize(("cores", "status"), [(1, "warning"), (64, "ok")])
def test_more_threads_than_cores_are_a_warning(
    cores: int, status: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr(doctor.psutil, "cpu_count", lambda logical: cores)
    checks = {check.name: check for check in doctor.check_environment(Settings(home), 4)}
    threads = checks["threads"]
    assert threads.status == status
    assert threads.way_out == (f"--threads {cores}" if status == "warning" else None)


# -- models ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Save a tiny model with a tokenizer; return its folder."""

    def save(model: Any, family: str = "smollm2", *, template: str | None = "") -> str:
        folder = tmp_path / "model"
        with quiet_transformers():
            sharpen(model).save_pretrained(folder)
            family_tokenizer(family).save_pretrained(folder)
        file = folder / "chat_template.jinja"
        if template is None:
            file.unlink()
        elif template:
            file.write_text(template, encoding="utf-8")
        return str(folder)

    return save


def tiny(name: str = "llama-gqa", **changes: Any) -> Any:
    if changes:
        return tf.LlamaForCausalLM(tf.LlamaConfig(**{**SHAPE, **changes}))
    return MODELS[name]()


def test_model_that_works_is_described_with_its_measured_gaps(diagnose: Any, saved: Any) -> None:
    record = diagnose(saved(tiny()))
    assert record["usable"], faults(record)
    assert record["layout"]["layers"] == [
        {"kind": "full", "window": 0, "layers": 3, "kv_heads": 2, "head_dim": 8}
    ]
    assert record["layout"]["kv_bytes_per_token"] == 3 * 2 * 2 * 8 * 4
    assert record["layout"]["context"] == SHAPE["max_position_embeddings"]
    gate = record["gate"]
    assert {row["case"] for row in gate["rows"]} >= {"prefill", "splice", "delete", "longer"}
    assert all(0 <= row["gap"] < row["tolerance"] == 1e-5 for row in gate["rows"])
    assert gate["control"] > 1000 * max(row["gap"] for row in gate["rows"])
    assert "0" in line(record, "splices, edits", "model")["fact"]
    assert record["per_1000_tokens"]["computed_ms"] > 0
    assert record["per_1000_tokens"]["moved_ms"] == 0, "read where they stand"
    assert line(record, "compiled K/V", "model")["fact"] == "read where they stand"
    assert record["template"]["late_system"] == dict.fromkeys(
        ["user", "assistant", "tool"], "system"
    )
    assert record["tokenizer"]["end_tokens"] == ["<|im_end|>"]


def test_dtype_is_the_one_asked_for(diagnose: Any, saved: Any) -> None:
    record = diagnose(saved(tiny()), "--dtype", "bfloat16")
    assert record["layout"]["dtype"] == "bfloat16"
    assert record["layout"]["kv_bytes_per_token"] == 3 * 2 * 2 * 8 * 2
    assert {row["tolerance"] for row in record["gate"]["rows"]} == {1e-1}
    wrong = diagnose(saved(tiny()), "--dtype", "bfloat")
    assert faults(wrong) == [("supported", "EngineError")]


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "learned positions": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
        "positions are learned",
    ),
    "state": (
        lambda: tf.MambaForCausalLM(
            tf.MambaConfig(vocab_size=89, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
        "its own state",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refused_model_is_a_line_with_the_reason_and_the_rest_is_there(
    name: str, diagnose: Any, saved: Any
) -> None:
    make, reason = UNSUPPORTED[name]
    record = diagnose(saved(make()))
    assert faults(record) == [("supported", "UnsupportedModelError")]
    assert record["exit_code"] == UnsupportedModelError.exit_code
    check = line(record, "supported", "model")
    assert reason in check["fact"] and "erratum" in check["way_out"]
    assert record["layout"] is record["gate"] is record["cost"] is None
    assert record["template"]["system"] == "keep", "the template is checked all the same"


def test_model_whose_splices_are_wrong_is_a_fault_that_shows_the_gaps(
    diagnose: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unrotated(layers: Any, turn: Any, spec: Any, outs: Any) -> None:
        for keys, out in zip(layers, outs, strict=True):
            out.copy_(keys)

    monkeypatch.setattr("kvnotes.engine.execute.turn_keys", unrotated)
    record = diagnose(saved(tiny()))
    assert faults(record) == [("splices, edits", "UnsupportedModelError")]
    assert any(row["gap"] > row["tolerance"] for row in record["gate"]["rows"])
    assert record["layout"] is not None and record["tokenizer"] is not None


def test_model_that_is_not_there_is_a_fault(diagnose: Any) -> None:
    record = diagnose("/no/such/model")
    assert faults(record) == [("model", "ModelNotFoundError")]
    assert record["exit_code"] == ModelNotFoundError.exit_code
    assert names(record, "model") == ["model"]


def test_damaged_weights_are_a_fault(diagnose: Any, saved: Any) -> None:
    folder = saved(tiny())
    file = Path(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    record = diagnose(folder)
    assert faults(record) == [("supported", "SegmentFormatError")]
    assert record["exit_code"] == SegmentFormatError.exit_code
    assert record["tokenizer"] is not None


def test_weights_that_do_not_fit_are_not_loaded(
    diagnose: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tiny())
    monkeypatch.setattr(doctor_model.psutil, "virtual_memory", lambda: Memory(10**9, 10_000))
    monkeypatch.setattr("kvnotes.engine.models.load_model_and_tokenizer", None)
    record = diagnose(folder)
    assert faults(record) == [("memory", "EngineError")]
    assert "10 kB are available" in line(record, "memory", "model")["fact"].replace("10.0", "10")


def test_tokenizer_that_is_missing_is_a_fault(diagnose: Any, saved: Any) -> None:
    folder = saved(tiny())
    (Path(folder) / "tokenizer.json").unlink()
    record = diagnose(folder)
    assert ("tokenizer", "ModelNotFoundError") in faults(record)


def test_model_without_a_chat_template_is_a_warning(diagnose: Any, saved: Any) -> None:
    record = diagnose(saved(tiny(), template=None))
    assert record["usable"] and record["template"] is None
    assert line(record, "chat template", "model")["status"] == "warning"


def test_template_that_is_no_jinja_is_a_fault(diagnose: Any, saved: Any) -> None:
    record = diagnose(saved(tiny(), template="{% if %}"))
    assert faults(record) == [("tokenizer", "TemplateError")]
    assert record["exit_code"] == TemplateError.exit_code


def test_template_that_shows_the_time_is_a_warning(diagnose: Any, saved: Any) -> None:
    clock = "{{ strftime_now('%d %B') }} " + FAMILIES["smollm2"].source
    record = diagnose(saved(tiny(), template=clock))
    assert record["template"]["shows_time"]
    assert line(record, "clock", "model")["status"] == "warning"


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral", "gemma", "gemma_refuses"])
def test_capabilities_are_those_that_prompts_use(family: str, diagnose: Any, saved: Any) -> None:
    from kvnotes.prompt import PromptTokenizer

    found = PromptTokenizer(family_tokenizer(family)).capabilities
    record = diagnose(saved(tiny(), family))
    template = record["template"]
    assert template["system"] == found.system
    assert template["adjacent_system"] == found.adjacent_system
    for before in ("user", "assistant", "tool"):
        assert template["late_system"][before] == found.erratum_role(before)
    fact = line(record, "late system", "model")["fact"]
    assert ("kept in place" in fact) == ("system" in template["late_system"].values())
    apart = line(record, "adjacent system", "model")["fact"]
    assert ("stay apart" in apart) == found.adjacent_system


@pytest.mark.parametrize(("one", "status"), [(1.0, "warning"), (9.0, "ok")])
def test_threads_that_only_wait_for_each_other_are_a_warning(
    one: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def threads(number: int | None = None) -> int:
        used.append(number or 2)
        return 2

    monkeypatch.setattr("kvnotes.engine.base.set_num_threads", threads)
    monkeypatch.setattr(
        doctor_model, "_short_pass_ms", lambda engine: one if used[-1] == 1 else 5.0
    )
    checkup = doctor_model.ModelCheckup("m", None, lambda text: None)
    (check,) = checkup._check_short_passes(object())  # type: ignore[arg-type]
    assert check.status == status
    assert "5.0 ms with 2 threads" in check.fact
    assert used[-1] == 2, "the threads are given back"


# -- the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["80", "120"])
def test_text_names_every_check_and_fits_its_width(
    columns: str,
    home: Path,
    saved: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    make, _ = UNSUPPORTED["learned positions"]
    home.chmod(0o755)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", saved(make())])
    assert stop.value.code == UnsupportedModelError.exit_code
    said = capsys.readouterr()
    assert said.err == "" and "\x1b" not in said.out
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert [row for row in lines if row in ("environment", "model")] == ["environment", "model"]
    assert any(row.startswith("fault    supported") for row in lines)
    assert any(row.startswith("warning  privacy") for row in lines)
    assert sum("way out: " in row for row in lines) >= 2
    assert lines[-1] == "not usable: 1 fault, 1 warning"


def test_usable_environment_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--no-model"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("usable: ")


def test_fault_carries_the_code_of_its_class() -> None:
    check = Check.fault("model", "a", StorageError("b", hint="c"))
    assert (check.error, check.exit_code) == ("StorageError", StorageError.exit_code)
    assert (check.fact, check.way_out) == ("b", "c")
