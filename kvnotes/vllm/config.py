"""How the plug-in is set up: `kv_connector_extra_config` of vLLM, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvnotes.engine.base import engine_versions
from kvnotes.errors import PlanError
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS
from kvnotes.settings import load_settings
from kvnotes.store import KVStore
from kvnotes.store.trust import Trust
from kvnotes.store.untrusted import problem

MIN_TOKENS = 64
"""Shorter segments are computed with their surroundings: less than two blocks of vLLM."""

JumpForm = Literal["in_place", "requeue"]


class ConnectorConfig(BaseModel):
    """Options of the plug-in.

    Attributes:
        model: File that describes the model, see `served.prepare`.
        store: Folder of the store; None: there are no segments.
        remote: URL of the store's remote tier.
        tenant: Whose segments are found.
        num_seam_tokens: Tokens recomputed at each splice.
        min_tokens: Shorter segments are not spliced.
        deadline_seconds: How long a request waits for segments to be opened and verified.
        allow_compile: Whether requests may compile segments.
        allow_refresh: Whether requests may use what was computed behind a field that has changed.
        jump: How the scheduler loads in the middle of a prompt; `requeue` for vLLM's second
            model runner, which keeps positions on its device.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    store: Path | None = None
    remote: str | None = None
    tenant: str = ""
    num_seam_tokens: Annotated[int, Field(ge=0, le=4096)] = DEFAULT_NUM_SEAM_TOKENS
    min_tokens: Annotated[int, Field(ge=1)] = MIN_TOKENS
    deadline_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    allow_compile: bool = False
    allow_refresh: bool = False
    jump: JumpForm = "in_place"

    @classmethod
    def of(cls, extra: dict[str, Any]) -> ConnectorConfig:
        """Return what vLLM's configuration says.

        Raises:
            PlanError: An option is not known or not valid.
        """
        try:
            return cls.model_validate(extra)
        except ValidationError as error:
            raise PlanError(
                f"kv_connector_extra_config is not valid: {problem(error)}",
                hint="start the server with `kvnotes vllm serve`, or see docs/vllm.md",
            ) from error

    def open_store(self) -> KVStore:
        """Return the store that the options name, with the keys of this machine."""
        return KVStore(
            self.store,
            remote=self.remote,
            trust=Trust.from_settings(load_settings()),
            tenant=self.tenant,
            versions=engine_versions(),
            memory_nbytes=0,  # workers keep what is open
        )
