"""What splicing a compiled image saves: its prefill, and the vision tower.

A random model of the form of Qwen2.5-VL, some 200 million parameters: times do not depend on
what weights say. A conversation of `--before` tokens, an image, and 32 new tokens; the image
was compiled for another conversation.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from common import arguments, interleaved, save
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from kvnotes.engine.hf import HFEngine
from kvnotes.engine.weights import state_dict_digest
from kvnotes.fidelity import compare, mask_reference
from kvnotes.plan import Match, Splice, plan_compose, plan_keep

TEXT = {
    "vocab_size": 2000,
    "hidden_size": 896,
    "intermediate_size": 2400,
    "num_hidden_layers": 16,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
VISION = {"depth": 12, "hidden_size": 640, "intermediate_size": 1700, "num_heads": 10}
START, END, IMAGE, VIDEO = 1990, 1991, 1992, 1993
NUM_NEW = 32


def main() -> None:
    """Run the benchmark."""
    parser = arguments("an image spliced, against one computed")
    parser.add_argument("--before", type=int, default=512)
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 48])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.model = "random, form of Qwen2.5-VL"
    torch.set_num_threads(args.threads)
    engine = engine_of(args.dtype)
    rows = [measure(engine, side, args) for side in args.sides]
    save(f"images-{args.dtype}", args, {"before": args.before, "new": NUM_NEW, "rows": rows})
    print(json.dumps(rows, indent=1))


def engine_of(dtype: str) -> HFEngine:
    """Return the engine of a random model."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION | {"out_hidden_size": TEXT["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).to(getattr(torch, dtype)).eval()
    return HFEngine(model.requires_grad_(False), state_dict_digest(model.state_dict()))


def measure(engine: HFEngine, side: int, args: Any) -> dict[str, Any]:
    """Time one size of image: everything computed, the image computed, the image spliced."""
    config = engine.model.config.vision_config
    width = 3 * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(side * side, width, dtype=engine.model.dtype)
    part = (START, *engine.add_image(pixels, (1, side, side)), END)
    before = tuple(i % 1900 for i in range(args.before))
    ids = (*before, *part, *range(NUM_NEW))
    segment = engine.compile(part)
    head = engine.prefill(before).cache
    ideal = plan_compose(ids, [Splice("image", segment.run, 0, len(part), len(before))])
    kept = [Match(0, 0, len(before))]
    splice = plan_keep(head.layout, kept, ideal, strategy="compose")
    spliced = engine.execute(splice, base=head, segments=[segment])
    reference = mask_reference(engine, spliced.cache.layout)
    cold = plan_keep(head.layout, kept, plan_compose(ids, []), strategy="suffix")

    def computed(*, tower: bool) -> float:
        if tower:
            engine._images._features.clear()  # type: ignore[union-attr]
        return engine.execute(cold, base=head).elapsed_ms

    def all_computed() -> float:
        engine._images._features.clear()  # type: ignore[union-attr]
        return engine.prefill(ids).elapsed_ms

    arms = {
        "full": all_computed,
        "image computed, tower too": partial(computed, tower=True),
        "image computed": partial(computed, tower=False),
        "image spliced": lambda: engine.execute(splice, base=head, segments=[segment]).elapsed_ms,
    }
    row: dict[str, Any] = interleaved(arms, args.runs)
    return row | {
        "patches": side * side,
        "tokens": len(part),
        "gap": compare(spliced.last_logits(), reference).max_logit_gap,
        "saved": round(
            row["image computed, tower too"]["median"] / row["image spliced"]["median"], 1
        ),
    }


if __name__ == "__main__":
    main()
