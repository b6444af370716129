"""Tiny random models that see images, and images."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from helpers_matrix import shrunk
from helpers_models import engine_of, sharpen
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from kvnotes.engine.hf import HFEngine

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 90, 91, 92, 93

SECTIONS = [2, 3, 3]
"""Pairs of a key that turn with time, height and width."""

VISION = {
    "out_hidden_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "num_attention_heads": 4,
    "depth": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 64,
    "patch_size": 4,
    "image_size": 32,
}

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl")
"""Sections side by side, interleaved ones with features for deeper layers, interleaved pairs."""


def seeing_model(name: str) -> Any:
    """Return a new tiny model that takes images."""
    config = shrunk(CONFIG_MAPPING[name](), {})
    for key, value in (
        ("image_token_id", IMAGE_ID),
        ("video_token_id", VIDEO_ID),
        ("vision_start_token_id", START_ID),
        ("vision_end_token_id", END_ID),
        ("image_start_token_id", START_ID),
        ("image_end_token_id", END_ID),
    ):
        if hasattr(config, key):
            setattr(config, key, value)
    config.text_config.rope_parameters["mrope_section"] = SECTIONS
    own = {"hidden_size": 64, "embed_dim": 32} if name == "qwen2_vl" else {}
    for key, value in (VISION | own).items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    torch.manual_seed(0)
    return sharpen(AutoModelForImageTextToText.from_config(config))


@cache
def seeing_engine(name: str) -> HFEngine:
    """Return the engine of a tiny model that takes images."""
    return engine_of(seeing_model(name))


def patches(model: Any, grid: tuple[int, int, int], seed: int) -> Tensor:
    """Return random pixels in the shape that a processor gives them."""
    config = model.config.vision_config
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    time = getattr(config, "temporal_patch_size", 1)
    random = torch.Generator().manual_seed(seed)
    size = grid[0] * grid[1] * grid[2]
    shape: tuple[int, ...] = (size, channels * time * config.patch_size**2)
    if model.config.model_type == "paddleocr_vl":  # it wants them as pictures
        shape = (size, channels, config.patch_size, config.patch_size)
    return torch.randn(shape, generator=random)
