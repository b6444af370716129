"""What an engine can do of all that sessions may ask for.

Owns `Abilities`. An engine that holds its K/V can do everything. One that stands for a server
reaches no K/V, and says so here: sessions refuse by name before anything is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvnotes.errors import PlanError


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do, and why not the rest.

    Args:
        strategies: Strategies of changes that it runs; None: every one.
        auto: What `auto` is for an edit without a scorecard.
        auto_because: Why it is that.
        erratum_modes: Where errata may go, the default first.
        splices: Compiled segments can be spliced.
        verify_levels: Checks of an edit that it can make.
        holds_kv: K/V and logits are here: references can be computed, K/V be saved.
        title: What it is, in messages.
        because: Why it cannot do the rest.
        hint: The way out.
    """

    strategies: tuple[str, ...] | None = None
    auto: str = "suffix"
    auto_because: str = "no scorecard for this model: exact by default"
    erratum_modes: tuple[str, ...] = ("rewrite", "append")
    splices: bool = True
    verify_levels: tuple[str, ...] = ("full", "cheap")
    holds_kv: bool = True
    title: str = "this engine"
    because: str = ""
    hint: str = ""

    def allows(self, strategy: str) -> bool:
        """Whether it runs a strategy; `auto` is always one that it does."""
        return strategy == "auto" or self.strategies is None or strategy in self.strategies

    def check_strategy(self, strategy: str) -> str:
        """Return a strategy.

        Raises:
            PlanError: The engine cannot run it.
        """
        self._check(self.allows(strategy), f"strategy {strategy!r}")
        return strategy

    def check_erratum_mode(self, mode: str) -> None:
        """Refuse a mode of errata that the engine has not."""
        self._check(mode in self.erratum_modes, f"erratum mode {mode!r}")

    def check_verify(self, level: str) -> None:
        """Refuse a check that the engine cannot make."""
        self._check(level in self.verify_levels, f"verify {level!r}")

    def check_splice(self, policy: str) -> None:
        """Refuse to always splice where nothing can be spliced."""
        self._check(self.splices or policy != "always", f"splice {policy!r}")

    def check_held(self, what: str) -> None:
        """Refuse what needs the K/V or the logits themselves."""
        self._check(self.holds_kv, what)

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            raise PlanError(f"{what} needs more than {self.title}: {self.because}", hint=self.hint)
