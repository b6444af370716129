"""Where the tokens of a prompt stand: at their slots, or on three axes where images do.

Owns what that decides about a plan: which way a view turns, what keeps its place, and what may
not stay. Without images every answer is the slots', and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvnotes.engine.execute import Turns, slots_say
from kvnotes.engine.images import Images, has_images
from kvnotes.plan import Plan, Reuse, layout_token_ids
from kvnotes.segment import KVCache


class Places:
    """Positions of prompts.

    Args:
        images: The images that may stand in them; None where a model takes none.
    """

    def __init__(self, images: Images | None) -> None:
        self._images = images

    def of(self, token_ids: Sequence[int]) -> Tensor | None:
        """Return positions `[3, tokens]`; None where they are the slots."""
        if self._images is None or not has_images(token_ids):
            return None
        return self._images.places(token_ids)

    def after(self, token_ids: Sequence[int]) -> int:
        """Return the position of the token after a prompt."""
        axes = self.of(token_ids)
        return len(token_ids) if axes is None else int(axes.max()) + 1

    def turns(self, axes: Tensor | None) -> Turns:
        """Return where the tokens of a view come from and go to.

        Args:
            axes: Positions of the prompt that they go to.
        """
        if self._images is None:
            return slots_say

        def turns(view: Reuse) -> tuple[Tensor, Tensor] | None:
            run, start = view.run, view.run.start
            seen = (*layout_token_ids(run.context), *run.token_ids)[: start + view.source_stop]
            source = self.of(seen)
            if axes is None and source is None:
                return None
            return (
                _stretch(source, start + view.source_start, start + view.source_stop),
                _stretch(axes, view.target_start, view.target_stop),
            )

        return turns

    def stays(self, axes: Tensor | None, base: KVCache | None) -> Callable[[Reuse], bool]:
        """Return whether what a cache holds at some slots has the prompt's positions there."""
        held = None if base is None else self.of(base.token_ids)
        if axes is None and held is None:
            return lambda view: True
        return lambda view: torch.equal(
            _stretch(axes, view.target_start, view.target_stop),
            _stretch(held, view.target_start, view.target_stop),
        )

    def stuck(self, plan: Plan) -> tuple[Reuse, ...]:
        """Return the views that keep their slots in a plan, but not their positions."""
        if self._images is None:
            return ()
        turns = self.turns(self.of(plan.token_ids))
        kept = [step for step in plan.steps if isinstance(step, Reuse) and not step.moved]
        pairs = [(view, turns(view)) for view in kept]
        return tuple(view for view, pair in pairs if pair and not torch.equal(*pair))


def _stretch(axes: Tensor | None, start: int, stop: int) -> Tensor:
    """Return the positions of some slots, on three axes."""
    return torch.arange(start, stop).expand(3, -1) if axes is None else axes[:, start:stop]
