"""What a request asks of the plug-in: the `kvnotes` part of its `kv_transfer_params`.

{"kvnotes": {"splice": false}}                    compute everything
{"kvnotes": {"values": {"tier": "gold"}}}         the variant compiled for this value
{"kvnotes": {"segments": ["refunds@3"]}}          only these, where they stand in the prompt
{"kvnotes": {"num_seam_tokens": 16}}
{"kvnotes": {"compile": {"name": "refunds", "version": 3, "preamble_tokens": 0}}}

Without it, segments are spliced where they stand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvnotes.errors import PlanError
from kvnotes.plan import Run
from kvnotes.store.untrusted import problem

KEY = "kvnotes"

_Name = Annotated[str, Field(max_length=1000, pattern="^[^\\x00-\\x1f\\x7f-\\x9f]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CompileWish(_Part):
    """Compile this prompt, from `preamble_tokens` on, as a segment.

    Attributes:
        name: Its name.
        version: Its version, 0 for none.
        preamble_tokens: Tokens of the prompt that it is compiled behind.
        variant: Values of the fields in that preamble.
    """

    name: _Name = ""
    version: Annotated[int, Field(ge=0, lt=1 << 48)] = 0
    preamble_tokens: Annotated[int, Field(ge=0)] = 0
    variant: dict[_Name, Annotated[str, Field(max_length=1000)]] = {}


class RefreshWish(_Part):
    """A field of this prompt had another value of as many tokens a moment ago.

    Attributes:
        start: Position of its first token.
        token_ids: The tokens that stood there.
    """

    start: Annotated[int, Field(ge=0)]
    token_ids: Annotated[tuple[int, ...], Field(min_length=1)]


class Wish(_Part):
    """What one request asks for; by default, to splice what stands in its prompt.

    Attributes:
        splice: Whether segments are looked for.
        segments: Only these: `name`, or `name@version`; None: all.
        values: Values of fields, which choose variants.
        num_seam_tokens: Tokens recomputed at each splice; None: the server's.
        compile: Make a segment of this prompt.
        refresh: Use again what was computed behind a field that has changed.
    """

    splice: bool = True
    segments: tuple[_Name, ...] | None = None
    values: dict[_Name, str] = {}
    num_seam_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None
    compile: CompileWish | None = None
    refresh: RefreshWish | None = None

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> Wish:
        """Return what the parameters of a request say.

        Raises:
            PlanError: They say something that is not known.
        """
        said = (params or {}).get(KEY)
        if said is None:
            return cls()
        try:
            return cls.model_validate_json(json.dumps(said))  # a list of JSON is a tuple
        except (ValidationError, TypeError, ValueError) as error:
            said = problem(error) if isinstance(error, ValidationError) else str(error)
            raise PlanError(
                f"kv_transfer_params has no valid {KEY!r}: {said}",
                hint="see docs/vllm.md for what it may hold",
            ) from error

    def allows(self, name: str, version: int) -> bool:
        """Whether a segment of this name may be spliced."""
        if self.segments is None:
            return True
        return name in self.segments or f"{name}@{version}" in self.segments


def compiled_run(token_ids: Sequence[int], wish: CompileWish) -> Run:
    """Return the run that a prompt becomes."""
    whole = Run(tuple(token_ids))
    return whole.cut(wish.preamble_tokens, len(whole))
