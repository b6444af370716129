"""What passes between an engine and a server that computes for it.

Owns `Exchange` and `Served`. An engine of this process has neither: what its plan says is what
happened. What a server does with a prompt is known when it has said so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Served:
    """What a server said about a prompt that it has computed.

    Args:
        ttft_ms: From the request to the first token of its reply.
        num_cached_tokens: Tokens that its own prefix cache had; None: it has not said so.
        num_spliced_tokens: Tokens taken from compiled segments; None without its plug-in.
        fallback_reason: Why it computed what was to be spliced; "" if it did not.
        notes: What else the caller must know.
    """

    ttft_ms: float
    num_cached_tokens: int | None = None
    num_spliced_tokens: int | None = None
    fallback_reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Exchange:
    """A prompt that a server computes, and what it has said about it so far.

    Args:
        carried: What every request about it carries.
        served: What was said in the first reply about it; None before that.
        told_at: When its first token came, by `time.perf_counter`.
    """

    carried: Mapping[str, object] = field(default_factory=dict)
    served: Served | None = None
    told_at: float = 0.0

    def note(self, text: str) -> None:
        """Add a note to what was said, once."""
        if self.served is not None and text not in self.served.notes:
            self.served = replace(self.served, notes=(*self.served.notes, text))
