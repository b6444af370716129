"""What the halves of the plug-in say to each other, once in each step of vLLM.

vLLM pickles these between its processes: plain values only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvnotes.vllm.planning import Load
from kvnotes.vllm.requests import CompileWish

BlockIds = tuple[list[int], ...]
"""The blocks of a request, for each group of layers."""


@dataclass(frozen=True, slots=True)
class Injection:
    """Put a stretch of a segment into the blocks of a request, before the forward pass.

    Args:
        request_id: The request.
        load: What.
        blocks: All blocks of the request.
        source: Blocks that are copied; none where K/V of a segment are put in.
    """

    request_id: str
    load: Load
    blocks: BlockIds
    source: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep the K/V that this step computes for a prompt, which becomes a segment.

    Args:
        request_id: The request.
        start: Position of the first token computed in this step.
        num_tokens: How many.
        token_ids: The whole prompt.
        wish: What it becomes.
        blocks: All blocks of the request.
    """

    request_id: str
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    wish: CompileWish
    blocks: BlockIds


@dataclass
class StepMeta(KVConnectorMetadata):
    """From the scheduler to every worker.

    Args:
        open: Segments that are wanted soon: open and verify them.
        close: Segments that nobody wants.
        injections: What is put in before this step's forward pass.
        captures: What is kept of it.
        ended: Requests that end without a segment.
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    injections: tuple[Injection, ...] = ()
    captures: tuple[Capture, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """From the workers to the scheduler; vLLM joins those of one step.

    Args:
        opened: Segments that can be put in now, by the number of workers that can.
        failed: Segments that a worker cannot open, and why.
        lost: Requests whose K/V could not be put in, and why.
        compiled: Requests whose prompt is a segment of the store now: "", or why it is not.
    """

    opened: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Return what both say."""
        assert isinstance(other, WorkerNews)
        return WorkerNews(
            self.opened + other.opened,
            {**self.failed, **other.failed},
            {**self.lost, **other.lost},
            {**self.compiled, **other.compiled},
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no news."""
        return not (self.opened or self.failed or self.lost or self.compiled)
