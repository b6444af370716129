"""Checking the environment: interpreter, packages, threads, memory, the folder of kvnotes.

Owns the checks that need no model. Ranges of versions are those of the installed metadata
of kvnotes; nothing is written but a temporary file in the folder, which goes at once.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import kvnotes
from kvnotes.cli.doctor_records import Check
from kvnotes.cli.listing import size
from kvnotes.errors import EngineError, StorageError
from kvnotes.settings import HOME_VARIABLE, Settings

DISTRIBUTION = "kvnotes"

SHOWN_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages that decide what is computed; they have a line of their own, the others one
together unless something is wrong."""

OPTIONAL_PACKAGES = {
    "aiohttp": "stores behind http:// and https://",
    "cryptography": "signed and encrypted segment files",
    "matplotlib": "plots of the benchmarks",
    "peft": "adapters on top of a model",
    "torchao": "quantized weights",
}

LOW_DISK_NBYTES = 1 << 30
"""Less free disk is worth a warning: the embedded model takes half of it, and a segment of
6,000 tokens a quarter."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_environment(settings: Settings, num_threads: int | None) -> Iterator[Check]:
    """Yield the lines about everything but a model.

    Args:
        settings: What the environment says.
        num_threads: CPU threads that torch uses; None where torch cannot be imported.
    """
    yield _check_python()
    yield Check.ok("environment", "platform", f"{platform.platform()}, {platform.machine()}")
    yield from check_packages()
    if num_threads is not None:
        yield _check_threads(num_threads)
    yield _check_memory()
    yield from check_home(settings)
    yield from _check_optional()


def check_packages() -> Iterator[Check]:
    """Yield the version of kvnotes, and those of what it needs against their ranges."""
    needed = _requirements()
    if needed is None:
        yield Check.warning(
            "environment",
            "kvnotes",
            f"{kvnotes.__version__}: not installed, so the supported versions are not known",
            "pip install -e . in the folder of its source",
        )
        return
    yield Check.ok(
        "environment", "kvnotes", f"{kvnotes.__version__}, {Path(kvnotes.__file__).parent}"
    )
    num_fine = 0
    for requirement in needed:
        check = _check_package(requirement)
        if requirement.name in SHOWN_PACKAGES or check.status != "ok":
            yield check
        else:
            num_fine += 1
    yield Check.ok("environment", "other packages", f"{num_fine} needed, all in their ranges")


def check_home(settings: Settings) -> Iterator[Check]:
    """Yield whether the folder of kvnotes can be used, has room, and is private."""
    home = settings.home
    fault = _unwritable(home)
    if fault is not None:
        hint = f"set {HOME_VARIABLE} to a folder that can be written"
        error = StorageError(f"{home}: {fault}", hint=hint)
        yield Check.fault("environment", HOME_VARIABLE, error)
        return
    there = home.is_dir()
    yield Check.ok(
        "environment", HOME_VARIABLE, f"{home}, {'can be written' if there else 'will be made'}"
    )
    free = shutil.disk_usage(_nearest_folder(home)).free
    if free < LOW_DISK_NBYTES:
        way_out = f"free some space, or set {HOME_VARIABLE} to a folder on another disk"
        yield Check.warning("environment", "disk", f"{size(free)} free", way_out)
    else:
        yield Check.ok("environment", "disk", f"{size(free)} free")
    if there:
        yield _check_private(settings)


def _check_python() -> Check:
    found = platform.python_version()
    try:
        wanted = metadata(DISTRIBUTION)["Requires-Python"] or ""
    except PackageNotFoundError:
        return Check.ok("environment", "python", f"{found}, {sys.executable}")
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check.ok("environment", "python", f"{found} (needs {wanted}), {sys.executable}")
    error = EngineError(
        f"{found} is installed, kvnotes needs {wanted}", hint="make a new environment with it"
    )
    return Check.fault("environment", "python", error)


def _requirements(extra: str = "") -> list[Requirement] | None:
    """What kvnotes needs here, with an extra or without any; None if it is not installed."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    parsed = [Requirement(line) for line in lines]
    return [
        item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})
    ]


def _check_package(requirement: Requirement) -> Check:
    name, wanted = requirement.name, requirement.specifier
    asked = f"{name}{wanted}"
    try:
        found = version(name)
    except PackageNotFoundError:
        error = EngineError(
            f"not installed, needs {wanted or 'any'}", hint=f'pip install "{asked}"'
        )
        return Check.fault("environment", name, error)
    if wanted.contains(found, prereleases=True):
        return Check.ok("environment", name, f"{found} (needs {wanted or 'any'})")
    error = EngineError(f"{found} is installed, needs {wanted}", hint=f'pip install "{asked}"')
    return Check.fault("environment", name, error)


def _check_threads(num_threads: int) -> Check:
    num_cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    plural = "" if num_threads == 1 else "s"
    cores = f"{num_cores} physical core{'' if num_cores == 1 else 's'}"
    fact = f"{num_threads} thread{plural} on {cores}"
    if num_threads > num_cores:
        return Check.warning(
            "environment",
            "threads",
            f"{fact}: they wait for each other, most of all in the short passes of an edit",
            f"--threads {num_cores}",
        )
    return Check.ok("environment", "threads", fact)


def _check_memory() -> Check:
    memory = psutil.virtual_memory()
    return Check.ok(
        "environment", "memory", f"{size(memory.available)} available of {size(memory.total)}"
    )


def _check_private(settings: Settings) -> Check:
    """Whether other users can read K/V, which can be inverted to text."""
    if os.name != "posix":
        return Check.ok("environment", "privacy", "permissions are not checked on this system")
    folders = [settings.home, settings.store]
    private = [not folder.stat().st_mode & _OTHERS for folder in folders if folder.is_dir()]
    if any(private):
        return Check.ok("environment", "privacy", "others cannot read what is stored")
    return Check.warning(
        "environment",
        "privacy",
        f"other users can enter {settings.home}, and K/V can be inverted to text",
        f"chmod 700 {settings.home}",
    )


def _check_optional() -> Iterator[Check]:
    extras = _extras()
    for name, purpose in OPTIONAL_PACKAGES.items():
        try:
            yield Check.ok("environment", name, f"{version(name)}, optional: {purpose}")
        except PackageNotFoundError:
            target = f'"{DISTRIBUTION}[{extras[name]}]"' if name in extras else name
            yield Check.ok(
                "environment", name, f"not there, optional: {purpose}", f"pip install {target}"
            )


def _extras() -> dict[str, str]:
    """Name of the extra that brings each optional package."""
    try:
        names: Sequence[str] = metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return {}
    always = {item.name for item in _requirements() or []}
    return {
        item.name: extra
        for extra in names
        for item in _requirements(extra) or []
        if item.name not in always
    }


def _unwritable(home: Path) -> str | None:
    """Return why a folder cannot be written or made, or None."""
    nearest = _nearest_folder(home)
    if home.exists() and not home.is_dir():
        return "it is a file"
    blocking = next((p for p in home.parents if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        return f"it cannot be made, {blocking} is a file"
    if not home.is_dir():
        fine = os.access(nearest, os.W_OK | os.X_OK)
        return None if fine else f"it cannot be made in {nearest}"
    try:
        with tempfile.TemporaryFile(dir=home):
            return None
    except OSError as error:
        return f"it cannot be written: {error.strerror}"


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((p for p in (path, *path.parents) if p.is_dir()), Path(path.anchor))
