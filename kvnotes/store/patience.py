"""How long one tries: attempts at something far away, bounded in number and time."""

from __future__ import annotations

import asyncio
import http.client
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvnotes.errors import StorageError

FIRST_WAIT_SECONDS = 0.1
MAX_WAIT_SECONDS = 5.0

PROGRESS_NBYTES = 64 << 10
"""What must come between two failures, so that they do not count together."""

_BREAKS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("azure.core.exceptions", "AzureError"),
    ("google.auth.exceptions", "TransportError"),
    ("gcsfs.retry", "HttpError"),
    ("paramiko", "SSHException"),
)
"""What file systems raise beside OSError, where they are in use."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """When to give up.

    Args:
        num_attempts: Failures in a row, without progress between them.
        seconds: No further attempt begins later than this, and a download stops; None has no
            limit. How long one attempt may be silent is a matter of the file system's options.
    """

    num_attempts: int
    seconds: float | None = None


PATIENT = Patience(6)
"""Somebody asked for the file and waits for it."""

SERVING = Patience(2, seconds=20.0)
"""A session could compile instead: about as long as compiling some thousand tokens takes."""


class Attempts:
    """Attempts at one thing.

    Args:
        what: For messages, after "cannot".
        patience: When to give up.
        sleep: Waits between attempts.
        retried: Called for each attempt after the first.
    """

    def __init__(
        self,
        what: str,
        patience: Patience,
        sleep: Callable[[float], None],
        retried: Callable[[], None] = lambda: None,
    ) -> None:
        self._what = what
        self._patience = patience
        self._sleep = sleep
        self._retried = retried
        self._started = time.monotonic()
        self._nbytes = 0
        self.num_failed = 0

    def run(self, action: Callable[[], Result]) -> Result:
        """Do something, again and again if it fails.

        Raises:
            StorageError: It failed too often, or in a way that no second attempt changes.
        """
        while True:
            try:
                return action()
            except failures() as error:
                self.failed(error)
            except NotImplementedError as error:
                raise self._refusal(error) from error

    def failed(self, error: BaseException) -> None:
        """Note a failure, and wait before the next attempt.

        Raises:
            StorageError: That was the last one.
        """
        if isinstance(error, StorageError):
            raise error
        if isinstance(error, (FileNotFoundError, PermissionError)):
            raise self._refusal(error) from error
        self.num_failed += 1
        self._nbytes = 0
        if self.num_failed >= self._patience.num_attempts or self._late():
            raise StorageError(
                f"cannot {self._what}: {reason_of(error)} ({self.num_failed} attempts)",
                hint="check the connection; what has arrived is kept, try again",
            ) from error
        self._retried()
        longest = min(FIRST_WAIT_SECONDS * 2 ** (self.num_failed - 1), MAX_WAIT_SECONDS)
        self._sleep(longest * random.uniform(0.5, 1.0))  # so that clients spread out

    def progress(self, nbytes: int) -> None:
        """Note that something came: after some bytes the count of failures begins again.

        Raises:
            StorageError: It takes too long all the same.
        """
        self._nbytes += nbytes
        if self._nbytes >= PROGRESS_NBYTES:
            self.num_failed = 0
        if self._late():
            raise StorageError(
                f"cannot {self._what} within {self._patience.seconds:.0f} s",
                hint="what has arrived is kept, and the next attempt goes on from there",
            )

    def _late(self) -> bool:
        limit = self._patience.seconds
        return limit is not None and time.monotonic() - self._started > limit

    def _refusal(self, error: BaseException) -> StorageError:
        return StorageError(
            f"cannot {self._what}: {reason_of(error)}",
            hint="this place may only be read, or your credentials do not reach it",
        )


def failures() -> tuple[type[BaseException], ...]:
    """Return what a file system raises when a connection breaks."""
    found = [getattr(sys.modules[name], error) for name, error in _BREAKS if name in sys.modules]
    # before Python 3.11 asyncio has a TimeoutError of its own
    return (OSError, EOFError, asyncio.TimeoutError, http.client.HTTPException, *found)


def reason_of(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
