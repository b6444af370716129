"""Images as tokens: who they are, where they stand, and what the vision tower made of them.

An image takes some tokens of a prompt. Here each of them is a negative id, made from the
SHA-256 of the image's pixels and its place in it: 62 bits each, at least three of them. So
lineage, plans and keys tell two images apart without knowing of images, and a prompt is still
a sequence of integers. Positions have three axes (time, height, width): the model itself says
where the tokens of a prompt stand.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvnotes.errors import EngineError

BITS = 62
"""Bits of the hash in one id: ids are signed 64-bit integers."""

MIN_TOKENS = 3
"""Fewest tokens of an image: at least 128 bits of its hash are in every key."""


@dataclass(frozen=True, eq=False)
class Image:
    """One image, as a processor prepares it.

    Args:
        pixels: Patches as the model's processor makes them, `[patches, values]`.
        grid: Patches in time, height and width.
        token_ids: The ids that stand for it.
    """

    pixels: Float[Tensor, "patches ..."]
    grid: tuple[int, int, int]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """What the vision tower makes of an image: rows for its tokens, and for deeper layers.

    Args:
        rows: One for each token.
        deeper: The same for the first layers of the decoder, where a model has them.
        form: Class of what the model's vision tower returns.
    """

    rows: Tensor
    deeper: tuple[Tensor, ...]
    form: Any


class Images:
    """The images that an engine knows, by the ids of their tokens.

    Args:
        model: A transformers model that `are_taken_by` accepts.
    """

    @staticmethod
    def are_taken_by(model: Any) -> bool:
        """Whether a model has a vision tower, and says where the tokens of an image stand."""
        inner = getattr(model, "model", None)
        return (
            hasattr(inner, "get_rope_index")
            and hasattr(inner, "get_image_features")
            and hasattr(model.config, "image_token_id")
            and "mm_encoder_outputs" in inspect.signature(model.forward).parameters
        )

    def __init__(self, model: Any) -> None:
        config = self._config = model.config
        self._inner: Any = model.model
        self._placeholder = int(config.image_token_id)
        self._merge = int(config.vision_config.spatial_merge_size)
        self._images: dict[int, tuple[Image, int]] = {}
        self._features: dict[int, Features] = {}
        self.num_seen = 0

    def add(
        self, pixels: Float[Tensor, "patches ..."], grid: tuple[int, int, int]
    ) -> tuple[int, ...]:
        """Make an image known; return the ids that stand for it in prompts.

        Raises:
            EngineError: The grid does not fit the pixels, or there are too few tokens.
        """
        time, height, width = grid
        size = time * height * width
        if size != len(pixels) or height % self._merge or width % self._merge:
            raise EngineError(
                f"an image of {len(pixels)} patches has no grid of {grid}",
                hint="give pixel_values and image_grid_thw as the model's processor makes them",
            )
        count = size // self._merge**2
        if count < MIN_TOKENS:
            raise EngineError(
                f"an image of {count} tokens cannot be told from others for certain",
                hint=f"enlarge it to {MIN_TOKENS} tokens",
            )
        state = hashlib.sha256(f"{grid} {pixels.dtype} {tuple(pixels.shape)}".encode())
        state.update(pixels.contiguous().view(-1).view(torch.uint8).numpy().data)
        digest = state.digest()
        ids = tuple(_token_id(digest, index) for index in range(count))
        if ids[0] not in self._images:
            image = Image(pixels, grid, ids)
            self._images |= {token: (image, index) for index, token in enumerate(ids)}
        return ids

    def probe(self) -> tuple[int, ...] | None:
        """Return the ids of a small random image; None if none is known that the model takes."""
        vision: Any = self._config.vision_config
        channels = int(getattr(vision, "in_channels", getattr(vision, "num_channels", 3)))
        frames = int(getattr(vision, "temporal_patch_size", 1))
        side, size = 2 * self._merge, int(vision.patch_size)
        random = torch.Generator().manual_seed(0)
        for shape in ((channels * frames * size**2,), (channels, size, size)):
            pixels = torch.randn(side**2, *shape, generator=random)
            ids = self.add(pixels.to(self._inner.dtype), (1, side, side))
            try:
                self._of(self._known(ids[0])[0])
            except Exception:  # third-party code: another shape may be right
                continue
            return ids
        return None

    def places(self, token_ids: Sequence[int]) -> Int[Tensor, "3 tokens"]:
        """Return the positions of a prompt's tokens, as the model itself counts them.

        An image may be cut off at the end.

        Raises:
            EngineError: An image is unknown, or its tokens do not stand together in order.
        """
        whole, images = list(token_ids), []
        for is_image, group in groupby(enumerate(token_ids), lambda item: item[1] < 0):
            if not is_image:
                continue
            found = list(group)
            start, ids = found[0][0], tuple(token for _, token in found)
            image = self._known(ids[0])[0]
            cut = image.token_ids[len(ids) :] if start + len(ids) == len(token_ids) else ()
            if (*ids, *cut) != image.token_ids:
                raise EngineError(
                    f"the image at token {start} does not stand there whole",
                    hint="put all ids of an image side by side, with other tokens between images",
                )
            whole += cut
            images.append(image)
        with torch.inference_mode():
            places, _ = self._inner.get_rope_index(
                torch.tensor([[self._placeholder if i < 0 else i for i in whole]]),
                mm_token_type_ids=torch.tensor([[int(i < 0) for i in whole]]),
                image_grid_thw=torch.tensor([image.grid for image in images]),
            )
        own: Tensor = places[:, 0, : len(token_ids)]
        return own

    def row_places(
        self,
        token_ids: Sequence[int],
        slots: Int[Tensor, " rows"],
        visible: Bool[Tensor, "rows rows"],
        target: int,
    ) -> Int[Tensor, "3 rows"]:
        """Return the positions of the rows of a masked forward, from what each of them sees.

        What a row sees is the prompt it stood in. Where that prompt does not begin with the
        target's, it was moved: to where the target's prompt, or one in it, has it.
        """
        seen = [row.nonzero()[:, 0] for row in visible]
        prompts = [rows[slots[rows].argsort()].tolist() for rows in seen]
        places = [self.places([token_ids[i] for i in rows]) for rows in prompts]
        begin = int(slots[prompts[target][0]])
        known: dict[int, Tensor] = {}
        waiting = list(zip(prompts, places, strict=True))
        while waiting:
            later = []
            for rows, found in waiting:
                shared = next((i for i, row in enumerate(rows) if row in known), None)
                if int(slots[rows[0]]) == begin:
                    shift = torch.zeros(3, dtype=torch.long)
                elif shared is not None:
                    shift = known[rows[shared]] - found[:, shared]
                else:
                    later.append((rows, found))
                    continue
                for index, row in enumerate(rows):
                    known.setdefault(row, found[:, index] + shift)
            if len(later) == len(waiting):
                raise EngineError(
                    f"{len(later)} rows stand in no prompt that begins with the target's",
                    hint="give every row that something sees",
                )
            waiting = later
        return torch.stack([known[row] for row in range(len(token_ids))], 1)

    def inputs(self, token_ids: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
        """Return ids with placeholders, and what the model takes in their place.

        Raises:
            EngineError: An image is unknown.
        """
        ids = [self._placeholder if token < 0 else token for token in token_ids]
        rows: list[Tensor] = []
        deeper: list[list[Tensor]] = []
        for token in token_ids:
            if token < 0:
                image, index = self._known(token)
                features = self._of(image)
                rows.append(features.rows[index])
                deeper.append([layer[index] for layer in features.deeper])
        if not rows:
            return ids, {}
        parts: dict[str, Any] = {"pooler_output": (torch.stack(rows),)}
        if deeper[0]:
            parts["deepstack_features"] = [(torch.stack(x),) for x in zip(*deeper, strict=True)]
        return ids, {"mm_encoder_outputs": {"image": features.form(**parts)}}

    def _of(self, image: Image) -> Features:
        """Run the vision tower, once for an image."""
        found = self._features.get(image.token_ids[0])
        if found is None:
            self.num_seen += 1
            with torch.inference_mode():
                output = self._inner.get_image_features(
                    image.pixels, torch.tensor([image.grid]), return_dict=True
                )
            deeper = getattr(output, "deepstack_features", None) or ()
            found = Features(
                _joined(output.pooler_output), tuple(_joined(x) for x in deeper), type(output)
            )
            self._features[image.token_ids[0]] = found
        return found

    def _known(self, token: int) -> tuple[Image, int]:
        found = self._images.get(token)
        if found is None:
            raise EngineError(
                "the prompt holds an image that this engine does not know",
                hint="add it: engine.add_image(pixel_values, grid)",
            )
        return found


def _token_id(digest: bytes, index: int) -> int:
    own = hashlib.sha256(digest + index.to_bytes(8, "little")).digest()
    return -1 - (int.from_bytes(own[:8], "little") >> (64 - BITS))


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def has_images(token_ids: Sequence[int]) -> bool:
    """Whether some tokens of a prompt stand for an image."""
    return min(token_ids, default=0) < 0
