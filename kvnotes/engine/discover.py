"""What a transformers model caches and how its positions work, or why it is refused.

No table of model names: the layout is found by asking the cache class and the rotary
modules, and by prefilling the same tokens at two places and explaining one by the other.
What cannot be explained is refused here, at load, with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvnotes.engine.config import constants_of, integer, num_layer_parameters, stated_limit
from kvnotes.engine.slots import CacheForm, CachingLayer
from kvnotes.engine.tables import Candidate, candidates
from kvnotes.errors import UnsupportedModelError
from kvnotes.rope import Rotary, move_keys
from kvnotes.spec import LayerKind, LayerSpec, ModelSpec, Pairing, RopeSpec, TensorName

PROBE_TOLERANCE = 2e-3
"""Largest relative error of a moved tensor in the load-time probe, per dtype below. It must
only tell layouts apart: a wrong pairing or a position-dependent model is off by 0.1 to 2."""

PROBE_TOLERANCE_HALF = 6e-2
"""The same for bf16 and fp16, whose own rounding of deeper layers reaches 2e-2."""

ANGLE_ROUNDING = 2.0**-22
"""Added to the tolerance for each position moved: models round angles to float32, so K/V far
from the start are off by about this much of themselves."""

SURE_SHARE = 0.02
"""Share of the tolerance below which an explanation needs no rival: that of float32 tables is a
thousandth. In half precision, rounding of deeper layers is as large as a wrong explanation of
keys that hardly turn, and the best one is taken."""

CLEARLY = 1.5
"""How much better another rotation must be than none, or than one that other layers have."""

SHARP = 0.2
"""Largest share of the tolerance just below a limit that the probe finds: queries and tables
that change there leave nothing below it, and what drifts is exact nowhere."""

NUM_PROBE_TOKENS = 6
PROBE_DISTANCE = 19

ERRATUM_HINT = (
    "use a decoder whose positions are rotary (Llama, Qwen, Mistral, Gemma, SmolLM); an erratum "
    "can still be sent to this model as text"
)

Held = dict[TensorName, Tensor]
"""What one layer caches of some tokens, `[kv_heads, tokens, width]`."""

Forward = Callable[[list[int], Tensor], list[Held]]
"""Token ids and positions to what each caching layer keeps, computed from nothing."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found: the spec, and a rotary embedding for each of its ropes."""

    spec: ModelSpec
    rotaries: tuple[Rotary, ...]


def check_supported(model: Any) -> CacheForm:
    """Return the form of a model's caches; refuse one that cannot be edited, before any work.

    Raises:
        UnsupportedModelError: Names the cause.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(model, "it is an encoder-decoder")
    try:
        form = CacheForm(model)
    except UnsupportedModelError as error:
        raise unsupported(model, error.message) from error
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise unsupported(model, "its positions cannot be set from outside")
    return form


def discover(model: Any, form: CacheForm, forward: Forward) -> Discovery:
    """Find a model's spec and rotary embeddings, proved on a few tokens.

    Args:
        model: A transformers causal language model in eval mode.
        form: Which of its layers cache something.
        forward: Runs it.

    Raises:
        UnsupportedModelError: Names the cause.
    """
    probe = _Probe(model, form, forward)
    near = probe.near
    search = _Search(probe.tables, probe.distance)
    num_chosen = integer(probe.config, "index_topk", 0)
    layers = []
    for index, (own, held, far) in enumerate(
        zip(form, near, probe.at(probe.distance), strict=True)
    ):
        moves = []
        for name, tensor in held.items():
            rope = search.explain(tensor, far[name], probe.allowed(probe.distance))
            if rope is None:
                raise unsupported(model, probe.why_unexplained(index, name, search.best))
            if rope != STILL:
                moves.append((name, rope))
        layers.append(_layer_spec(own, held, tuple(moves), num_chosen))
    rotaries = tuple(search.found)
    config = probe.config
    limit, reason = probe.limit(layers, rotaries)
    spec = ModelSpec(
        model_type=config.model_type,
        layers=tuple(layers),
        num_attention_heads=integer(config, "num_attention_heads", layers[0].num_kv_heads),
        hidden_size=integer(config, "hidden_size", 0),
        vocab_size=integer(config, "vocab_size", 0),
        max_positions=limit,
        dtype=str(model.dtype).removeprefix("torch."),
        ropes=tuple(rotary.spec for rotary in rotaries),
        constants=constants_of(config),
        num_parameters=num_layer_parameters(model),
        limit_reason=reason,
    )
    return Discovery(spec, rotaries)


def probe_ids(config: Any) -> list[int]:
    """Return a few tokens spread over the vocabulary."""
    step = max(1, config.vocab_size // (NUM_PROBE_TOKENS + 1))
    return [(i + 1) * step % config.vocab_size for i in range(NUM_PROBE_TOKENS)]


def unsupported(model: Any, reason: str) -> UnsupportedModelError:
    """Return the refusal of a model."""
    return UnsupportedModelError(
        f"model type {model.config.model_type!r} is not supported: {reason}", hint=ERRATUM_HINT
    )


# -- what moves a tensor ---------------------------------------------------------------------


STILL = -1
"""What moves a tensor that carries no position."""


class _Search:
    """Finds the rotation that takes a tensor from one place to another."""

    def __init__(self, tables: Sequence[Candidate], distance: int) -> None:
        self._tables = tables
        self._source = torch.arange(NUM_PROBE_TOKENS)
        self._distance = distance
        self.found: list[Rotary] = []
        self.best = float("inf")

    def explain(self, near: Tensor, far: Tensor, allowed: float) -> int | None:
        """Return which rotation explains `far`, or `STILL`; None if nothing does.

        `best` is the least error that was found then.
        """
        still = self.best = gap(near, far)
        known = [self._error(near, far, rotary) for rotary in self.found]
        sure = SURE_SHARE * allowed
        if min([still, *known]) > sure:
            new = [
                (self._error(near, far, rotary), rotary)
                for candidate in self._tables
                for rotary in _rotaries(candidate, near.shape[2])
            ]
            error, rotary = min(new, key=lambda item: item[0], default=(float("inf"), None))
            if rotary is not None and CLEARLY * error < min([still, *known]):
                self.found.append(rotary)
                known.append(error)
        self.best = min([still, *known])
        if self.best > allowed:
            return None
        return STILL if still == self.best else known.index(self.best)

    def _error(self, near: Tensor, far: Tensor, rotary: Rotary) -> float:
        if rotary.spec.start + rotary.spec.rotary_dim > near.shape[2]:
            return float("inf")
        return gap(move_keys(near, self._source, self._source + self._distance, rotary), far)


def _rotaries(candidate: Candidate, width: int) -> list[Rotary]:
    """Return every way to rotate a tensor of a width with a table."""
    size = candidate.rotary_dim
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    return [
        Rotary(
            RopeSpec(
                candidate.kind, size, pairing, candidate.digest, candidate.factor, start, backwards
            ),
            candidate.table,
        )
        for backwards in (False, True)
        for start in sorted({0, max(0, width - size)})
        for pairing in pairings
    ]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    scale = theirs.float().abs().max().clamp_min(1e-30)
    return float((ours.float() - theirs.float()).abs().max() / scale)


# -- the probe -------------------------------------------------------------------------------


class _Probe:
    """The same few tokens at several places."""

    def __init__(self, model: Any, form: CacheForm, forward: Forward) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.chunk = max((x.window for x in form if x.chunked), default=0)
        self.distance = self._aligned(PROBE_DISTANCE)
        self._forward = forward
        self._ids = probe_ids(self.config)
        self.near: list[Held] = []
        try:
            self.tables = candidates(model, self._run, NUM_PROBE_TOKENS)
        except Exception as error:  # third-party code: whatever it is, the model is refused
            reason = f"its forward does not take our cache or mask: {_short(error)}"
            raise unsupported(model, reason) from error

    def _run(self) -> None:
        self.near = self._forward(self._ids, torch.arange(NUM_PROBE_TOKENS))

    def at(self, distance: int) -> list[Held]:
        """Return what is cached of the tokens at a distance from the start."""
        try:
            return self._forward(self._ids, torch.arange(NUM_PROBE_TOKENS) + distance)
        except Exception as error:
            reason = f"it cannot compute tokens at position {distance}: {_short(error)}"
            raise unsupported(self.model, reason) from error

    def allowed(self, distance: int) -> float:
        """Return the largest relative error at a distance."""
        exact = self.model.dtype == torch.float32
        return (PROBE_TOLERANCE if exact else PROBE_TOLERANCE_HALF) + distance * ANGLE_ROUNDING

    def limit(self, layers: Sequence[LayerSpec], rotaries: Sequence[Rotary]) -> tuple[int, str]:
        """Return the longest context in which K/V only move, and why it is not the model's own.

        Some models scale queries, or change their tables, from a position on.
        """
        stated, reason = stated_limit(self.config)
        far = self._aligned(stated - NUM_PROBE_TOKENS)
        if far <= self.distance or self._moves(far, layers, rotaries):
            return stated, reason
        low, high = self.distance, far
        while high - low > 1:
            middle = self._aligned((low + high) // 2)
            if not low < middle < high:
                break
            low, high = (middle, high) if self._moves(middle, layers, rotaries) else (low, middle)
        if self._worst(low, layers, rotaries) > SHARP * self.allowed(low):
            raise unsupported(
                self.model,
                "what it caches changes with the position, gradually, in more than rotation",
            )
        return low + NUM_PROBE_TOKENS, (
            f"what it caches depends on more than rotation from position {low + NUM_PROBE_TOKENS} "
            "on: queries scaled by position, or tables that change with the length"
        )

    def _moves(
        self, distance: int, layers: Sequence[LayerSpec], rotaries: Sequence[Rotary]
    ) -> bool:
        """Whether what is cached at a distance is what stands near, moved."""
        return self._worst(distance, layers, rotaries) <= self.allowed(distance)

    def _worst(
        self, distance: int, layers: Sequence[LayerSpec], rotaries: Sequence[Rotary]
    ) -> float:
        """Return the largest relative error of anything moved by a distance."""
        source, worst = torch.arange(NUM_PROBE_TOKENS), 0.0
        for layer, near, far in zip(layers, self.near, self.at(distance), strict=True):
            for name, tensor in near.items():
                rope = layer.rope_of(name)
                if rope is not None:
                    tensor = move_keys(tensor, source, source + distance, rotaries[rope])
                error = gap(tensor, far[name])
                worst = error if not error <= worst else worst  # also what is no number
        return worst

    def _aligned(self, distance: int) -> int:
        """Return a distance near one, at which the tokens still stand in one chunk."""
        if not self.chunk or distance % self.chunk + NUM_PROBE_TOKENS <= self.chunk:
            return distance
        below = distance - distance % self.chunk
        return below if below else self.chunk

    def why_unexplained(self, layer: int, name: TensorName, error: float) -> str:
        """Say why a tensor does not move, as far as that can be found out."""
        head = f"layer {layer}'s {name} do not move by rotation (relative error {error:.1e}): "
        scaled = [
            n for n, _ in self.model.named_modules() if n.endswith(("k_norm", "key_layernorm"))
        ]
        if not self.tables:
            return _why_no_table(self.model)
        if layer > 0 or scaled:
            return head + (
                "norm weights after the rotation, or positions that enter in another way"
                if scaled
                else "positions enter in another way too"
            )
        return head + "it is not rotated with any table that the model has"


def _layer_spec(
    own: CachingLayer,
    held: Held,
    moves: tuple[tuple[TensorName, int], ...],
    num_chosen: int,
) -> LayerSpec:
    keys, values = held["keys"], held["values"]
    kind: LayerKind = "full"
    if own.window:
        kind = "chunked" if own.chunked else "sliding"
    elif {name for name, _ in moves} >= {"values"}:
        kind = "latent"
    return LayerSpec(
        kind,
        keys.shape[0],
        keys.shape[2],
        None if values.shape[2] == keys.shape[2] else values.shape[2],
        held["index"].shape[2] if "index" in held else 0,
        moves,
        own.window or (num_chosen if "index" in held else 0),
    )


def _why_no_table(model: Any) -> str:
    learned = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and "pos" in name.split(".")[-1].lower()
    ]
    if learned or any(name.split(".")[-1] == "wpe" for name, _ in model.named_modules()):
        return "its positions are learned, or added to the input: K/V cannot be moved"
    return "it has no rotary embedding, and what it caches depends on the position"


def _short(error: Exception) -> str:
    text = str(error).split("\n")[0][:200]
    return f"{type(error).__name__}: {text}"
