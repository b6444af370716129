"""What the online benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass

from kvnotes.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How much is measured.

    Args:
        lengths: Tokens of the policy.
        rates: Requests per second; all at once is measured in any case.
        requests: For each arm at each rate.
        blocks: Into how many parts they are cut, between which the arms take turns.
        output_tokens: Of each reply.
        places: Where the field stands in the policy, in percent of it; 0 is always measured.
        bound_ms: Requests whose first token comes within this count as good.
        timeout_s: A request that takes longer has failed.
        seed: Of the arrivals.
    """

    lengths: tuple[int, ...] = (2048, 7168)
    rates: tuple[float, ...] = (0.5, 1.0)
    requests: int = 16
    blocks: int = 2
    output_tokens: int = 16
    places: tuple[int, ...] = (0, 25, 50, 75, 95)
    bound_ms: float = 1000.0
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= self.requests:
            raise PlanError(
                f"{self.requests} requests cannot be cut into {self.blocks} blocks",
                hint="give at least as many requests as blocks",
            )
        if any(not 0 <= place < 100 for place in self.places):
            raise PlanError(
                f"places of the field are {self.places}, in percent of the policy before it",
                hint="write 0,25,50,75,95",
            )
        if any(rate <= 0 for rate in self.rates):
            raise PlanError(f"rates are {self.rates} requests per second", hint="write 0.5,1,2")
