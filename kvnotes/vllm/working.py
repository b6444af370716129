"""The half of the plug-in in vLLM's workers: K/V into its cache, and out of it.

Keys are moved from the source copy in float32 and go through the backend's own update of its
cache, which knows its layout and its quantization.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvnotes.rope import turn_keys
from kvnotes.segment import KVSegment, Tensors, empty_tensors
from kvnotes.spec import TensorName
from kvnotes.store.header import Provenance
from kvnotes.vllm.config import ConnectorConfig
from kvnotes.vllm.layers import (
    ServedLayer,
    by_name,
    check_shapes,
    check_spec,
    check_tables,
    heads_of,
    order_of,
    slots_of,
)
from kvnotes.vllm.messages import Capture, Injection, StepMeta, WorkerNews
from kvnotes.vllm.metrics import SpliceStats
from kvnotes.vllm.requests import compiled_run
from kvnotes.vllm.served import PreparedModel

logger = logging.getLogger(__name__)

MAX_MOVED_NBYTES = 1 << 30
"""Moved keys are kept, up to this many bytes: most splices of a segment stand at few places."""


@dataclass(slots=True)
class _Capturing:
    """A prompt that is being compiled: its K/V so far."""

    tensors: Tensors
    num_tokens: int = 0


class WorkerSide:
    """Puts segments into the cache of one worker.

    Args:
        served: The model.
        config: How the plug-in is set up.
        groups: vLLM's groups of layers.
        layers: Attention layers by name, as vLLM's forward passes know them.
        num_blocks: Blocks of the cache.
        rank: This worker.
        num_workers: Workers that hold a share of the heads each.
        dtype: Of the model's weights here, such as `bfloat16`.
        jumps: Whether the scheduler is ours, and takes back what could not be put in.

    Raises:
        UnsupportedModelError: vLLM keeps K/V of this model otherwise than its spec says.
    """

    def __init__(
        self,
        served: PreparedModel,
        config: ConnectorConfig,
        groups: Sequence[Any],
        layers: dict[str, Any],
        *,
        num_blocks: int,
        rank: int,
        num_workers: int,
        dtype: str,
        jumps: bool,
    ) -> None:
        self.stats = SpliceStats()
        self._jumps, self._num_blocks = jumps, num_blocks
        self._served, self._config = served, config
        self._spec = served.identity.spec
        self._modules = layers
        names, places = order_of(by_name(groups)), by_name(groups)
        check_spec(self._spec, len(names), dtype)
        self._layers: list[ServedLayer] = []
        for index, name in enumerate(names):
            module = layers[name]
            check_shapes(self._spec, index, int(module.head_size))
            total = self._spec.layers[index].num_kv_heads
            heads = heads_of(rank, num_workers, total, int(module.num_kv_heads))
            self._layers.append(ServedLayer(name, index, *places[name], heads))
        self._tables_checked = False
        self._store = config.open_store()
        self._segments: dict[str, KVSegment] = {}
        self._moved: OrderedDict[tuple[str, int], list[Tensor]] = OrderedDict()
        self._opener = ThreadPoolExecutor(1, "kvnotes-open")
        self._opening: dict[str, Future[KVSegment | None]] = {}
        self._news = WorkerNews()
        self._invalid: set[int] = set()
        self._capturing: dict[str, _Capturing] = {}
        self._captures: tuple[Capture, ...] = ()
        if config.allow_compile and num_workers == 1:
            self._listen()

    # -- each step ---------------------------------------------------------------------------

    def begin(self, meta: StepMeta) -> None:
        """Begin a step: what it computes may have to be kept."""
        for request_id in meta.ended:
            self._capturing.pop(request_id, None)
        self._captures = meta.captures

    def load(self, meta: StepMeta) -> None:
        """Open what is wanted, and put in what is due: before the forward pass, if anything is."""
        for key in meta.close:
            self._segments.pop(key, None)
            for place in [place for place in self._moved if place[0] == key]:
                del self._moved[place]
        for key in meta.open:
            if key in self._segments:
                self._news.opened[key] += 1
            elif key not in self._opening:
                self._opening[key] = self._opener.submit(self._store.get, key)
        for injection in meta.injections:
            self._inject(injection)

    def finish(self) -> None:
        """End a step."""
        for capture in self._captures:
            self._finish_capture(capture)
        self._captures = ()
        for key in [key for key, future in self._opening.items() if future.done()]:
            self._take(key, self._opening.pop(key))

    def take_news(self) -> WorkerNews | None:
        """Return what the scheduler has to know."""
        news, self._news = self._news, WorkerNews()
        return None if news.is_empty else news

    def take_invalid(self) -> set[int]:
        """Return the blocks whose load failed."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def check_model(self, model: Any) -> None:
        """Compare vLLM's rotary tables with the model's own.

        Raises:
            UnsupportedModelError: They differ.
        """
        check_tables(self._served.rotaries, model, self._spec.dtype)
        self._tables_checked = True

    # -- segments ----------------------------------------------------------------------------

    def _take(self, key: str, future: Future[KVSegment | None]) -> None:
        """Keep a segment that was opened and verified, or say why it was not."""
        try:
            segment = future.result()
            if segment is None:
                self._news.failed[key] = "it is not in the store, or damaged"
                return
            self._served.identity.check_same(segment.identity, f"segment {key[:12]}")
        except Exception as error:  # whatever it is: the request is computed
            self._news.failed[key] = f"{type(error).__name__}: {error}"
            return
        self._segments[key] = segment
        self._news.opened[key] += 1

    # -- into the cache ----------------------------------------------------------------------

    def _inject(self, injection: Injection) -> None:
        start = time.perf_counter()
        try:
            self._put(injection)
        except Exception as error:  # whatever it is: the request is computed
            said = f"{type(error).__name__}: {error}"
            logger.warning("kvnotes: request %s: %s", injection.request_id, said)
            self._news.lost[injection.request_id] = said
            if self._jumps:  # our scheduler reads the news
                return
            load, size = injection.load, self._layers[0].block_size
            first, stop = load.target_start // size, -(-load.target_stop // size)
            self._invalid.update(injection.blocks[0][first:stop])
            return
        load = injection.load
        itemsize = torch.empty(0, dtype=getattr(torch, self._spec.dtype)).element_size()
        self.stats.count("loaded_bytes", load.num_tokens * self._spec.nbytes_per_token(itemsize))
        self.stats.count("load_seconds", time.perf_counter() - start)

    def _copy(self, injection: Injection) -> None:
        """Copy whole blocks: they stand at the same places, whatever their layout is."""
        first = injection.load.target_start // self._layers[0].block_size
        goal = injection.blocks[0][first : first + len(injection.source)]
        for layer in self._layers:
            cache = self._modules[layer.name].kv_cache
            axis = next(i for i, n in enumerate(cache.shape[:2]) if n % self._num_blocks == 0)
            parts = cache.shape[axis] // self._num_blocks  # of a block, for the kernel
            source, target = (
                (torch.tensor(ids)[:, None] * parts + torch.arange(parts)).flatten()
                for ids in (injection.source, goal)
            )
            source, target = source.to(cache.device), target.to(cache.device)
            cache.index_copy_(axis, target, cache.index_select(axis, source))

    def _put(self, injection: Injection) -> None:
        if injection.source:
            return self._copy(injection)
        load = injection.load
        segment = self._segments[load.key]
        part = slice(load.source_start, load.source_start + load.num_tokens)
        keys = self._keys(segment, load.key, load.shift)
        slots: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.inference_mode():
            for layer in self._layers:
                if layer.group not in slots:
                    slots[layer.group] = slots_of(
                        injection.blocks[layer.group],
                        layer.block_size,
                        load.target_start,
                        load.num_tokens,
                    )
                places, kept = slots[layer.group]
                if len(places):
                    self._write(layer, keys, segment.values, part, places, kept)

    def _write(
        self,
        layer: ServedLayer,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        part: slice,
        places: Tensor,
        kept: Tensor,
    ) -> None:
        """Write one layer through the backend's own update."""
        module = self._modules[layer.name]
        cache = module.kv_cache
        pair = []
        for tensors in (keys, values):
            chosen = tensors[layer.index][layer.heads, part]
            if len(kept) < chosen.shape[1]:
                chosen = chosen[:, kept]
            pair.append(chosen.transpose(0, 1).contiguous().to(cache.device))
        module.impl.do_kv_cache_update(module, *pair, cache, places.to(cache.device))

    def _keys(self, segment: KVSegment, key: str, shift: int) -> Sequence[Tensor]:
        """Return the keys of a segment moved by a distance; the last ones are kept."""
        if not shift:
            return segment.keys
        place = (key, shift)
        if place not in self._moved:
            self._moved[place] = self._moved_keys(segment, shift)
            held = sum(t.numel() * t.element_size() for ts in self._moved.values() for t in ts)
            while held > MAX_MOVED_NBYTES and len(self._moved) > 1:
                _, gone = self._moved.popitem(last=False)
                held -= sum(t.numel() * t.element_size() for t in gone)
        self._moved.move_to_end(place)
        return self._moved[place]

    def _moved_keys(self, segment: KVSegment, shift: int) -> list[Tensor]:
        moved = [torch.empty_like(keys) for keys in segment.keys]
        start, size = segment.run.start, segment.num_tokens
        for rope, rotary in enumerate(self._served.rotaries):
            own = [i for i, x in enumerate(self._spec.layers) if x.rope_of("keys") == rope]
            turn = rotary.shift(start, start + shift, size)
            turn_keys([segment.keys[i] for i in own], turn, rotary.spec, [moved[i] for i in own])
        for index, layer in enumerate(self._spec.layers):
            if layer.rope_of("keys") is None:
                moved[index] = segment.keys[index]
        return moved

    # -- out of the computation --------------------------------------------------------------

    def _listen(self) -> None:
        """Have every layer say what it writes into its cache."""
        for layer in self._layers:
            module = self._modules[layer.name]
            module.impl.do_kv_cache_update = self._heard(layer, module.impl.do_kv_cache_update)

    def _heard(self, layer: ServedLayer, update: Callable[..., Any]) -> Callable[..., Any]:
        def do_kv_cache_update(
            module: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
        ) -> Any:
            for capture in self._captures:
                try:
                    self._keep(layer, capture, key, value, slots)
                except Exception as error:  # whatever it is: the forward pass goes on
                    self._capturing.pop(capture.request_id, None)
                    said = f"{type(error).__name__}: {error}"
                    self._news.compiled[capture.request_id] = said
            return update(module, key, value, cache, slots)

        return do_kv_cache_update

    def _keep(
        self, layer: ServedLayer, capture: Capture, key: Tensor, value: Tensor, slots: Tensor
    ) -> None:
        """Copy the rows of one prompt."""
        held = self._capturing.get(capture.request_id)
        if held is None and capture.request_id in self._news.compiled:
            return  # it failed in a layer before
        if held is None:
            dtype = getattr(torch, self._spec.dtype)
            held = _Capturing(empty_tensors(self._spec, len(capture.token_ids), dtype))
            self._capturing[capture.request_id] = held
        wanted, _ = slots_of(
            capture.blocks[layer.group], layer.block_size, capture.start, capture.num_tokens
        )
        here = slots.cpu()
        # the rows of a request stand side by side, in order
        first = int((here == wanted[0]).nonzero()[0, 0])
        rows = slice(first, first + capture.num_tokens)
        if len(wanted) != capture.num_tokens or not torch.equal(here[rows], wanted):
            raise ValueError("the rows of a prompt do not stand side by side")
        target = slice(capture.start, capture.start + capture.num_tokens)
        pair: tuple[tuple[TensorName, Tensor], ...] = (("keys", key), ("values", value))
        for name, states in pair:
            held.tensors[name][layer.index][:, target] = states[rows].transpose(0, 1).cpu()

    def _finish_capture(self, capture: Capture) -> None:
        """Put a prompt into the store once all of it is computed."""
        held = self._capturing.get(capture.request_id)
        stop = capture.start + capture.num_tokens
        if held is None or held.num_tokens != capture.start:
            self._capturing.pop(capture.request_id, None)
            return  # it was preempted, and begins again
        held.num_tokens = stop
        if stop < len(capture.token_ids):
            return
        del self._capturing[capture.request_id]
        wish = capture.wish
        run = compiled_run(capture.token_ids, wish)
        cut = slice(wish.preamble_tokens, None)
        tensors: Tensors = {
            name: tuple(t[:, cut].contiguous() for t in parts)
            for name, parts in held.tensors.items()
        }
        preamble = capture.token_ids[: wish.preamble_tokens]
        segment = KVSegment(run, self._served.identity, tensors, preamble_ids=preamble)
        said = Provenance(
            name=wish.name, version=wish.version, variant=tuple(sorted(wish.variant.items()))
        )
        try:
            self._store.put(segment, said)
            self._news.compiled[capture.request_id] = ""
        except Exception as error:  # whatever it is: the reply does not depend on it
            self._news.compiled[capture.request_id] = f"{type(error).__name__}: {error}"
