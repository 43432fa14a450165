"""Any family of transformers that sees: the loaded tower, in transformers' own forward.

The images and videos of a batch are joined into as few calls as their shapes allow, and what a call gives is dealt out
again: item → tiles → rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.models.adapter import Tower, TowerInput
from encoder_svc.models.image_families import ImageFamily, Joining
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.weights import TowerWeights, build_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import Modality

_STACKED = 4
"""Dimensions of patches that hold some frames each: patch, channel, frame, pixel."""

_ONE_ROW = 2
"""Patches of the side of a merge block."""

_Numbered = tuple[int, TowerInput]


class TransformersImageTower:
    """The loaded tower.

    Args:
        model: transformers' base model without its language model, on the device.
        family: how it is called.
        frames: how often a patch is repeated.
        normalisations: of the pixels of each modality.
        dtype: of weights and embeddings.
        device: of the model.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self,
        model: Any,
        family: ImageFamily,
        frames: int,
        normalisations: Mapping[Modality, Normalisation],
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._call = getattr(model, family.method)
        self._call_video = model.get_video_features if family.videos is not None and family.videos.apart else None
        self._family = family
        self._frames = frames
        self._normalisations = normalisations
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        encoded: dict[int, tuple[torch.Tensor, ...]] = {}
        for group in self._calls(items):
            found = self._encode([item for _, item in group])
            encoded.update(zip((number for number, _ in group), found, strict=True))
        return [encoded[number] for number in range(len(items))]

    def _calls(self, items: Sequence[TowerInput]) -> Iterator[list[_Numbered]]:
        """The items of each call, with their places in the batch."""
        alike: dict[tuple[int, ...], list[_Numbered]] = {}
        for number, item in enumerate(items):
            # Tiles must be of one size, videos with a call of their own of one length; other pixels are made to fit.
            shape = tuple(item.tensors[0].shape) if self._is_apart(item) else self._tile_shape(item)
            kind = int(self._is_apart(item)), int(self._is_one_of_several(item))
            alike.setdefault((*kind, *shape), []).append((number, item))
        for group in alike.values():
            count = self._family.items_a_call or len(group)
            for start in range(0, len(group), count):
                yield group[start : start + count]

    def _encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        if len(items) == 1 and (self._is_one_row(items[0]) or self._is_one_of_several(items[0])):
            return self._encode([items[0], items[0]])[:1]
        if self._call_video is not None and self._is_apart(items[0]):
            videos = torch.stack([self._pixels(item) for item in items])
            output = self._call_video(pixel_values_videos=videos)
            return [(rows,) for rows in output.pooler_output]
        pixels = _join([self._pixels(item) for item in items], self._family.joining)
        arguments = {
            name: torch.cat([item.tensors[place] for item in items]).to(self._device)
            for place, name in enumerate(self._family.arguments, 1)
        }
        if self._is_one_of_several(items[0]):
            arguments["batch_num_images"] = torch.tensor([len(items)])
        output = self._call(pixel_values=pixels, **arguments)
        if self._family.pooled_width is not None:
            return [
                (rows, pooled[None])
                for rows, pooled in zip(output.last_hidden_state, output.pooler_output, strict=True)
            ]
        return _deal(list(output.pooler_output), [self._pieces(item) for item in items])

    def _pixels(self, item: TowerInput) -> torch.Tensor:
        """An item's pixels as the first layer takes them."""
        pixels = self._normalisations[item.modality](item.tensors[0].to(self._device)).to(self._dtype)
        if self._frames == 1:
            return pixels
        # Rows of patches: channel, frame, row, column. A still image fills all frames.
        stacked = pixels if pixels.dim() == _STACKED else pixels.unsqueeze(2).expand(-1, -1, self._frames, -1)
        return stacked.flatten(1)

    def _tile_shape(self, item: TowerInput) -> tuple[int, ...]:
        flat = self._frames > 1 or self._family.joining is not Joining.TILES
        return () if flat else tuple(item.tensors[0].shape[1:])

    def _is_apart(self, item: TowerInput) -> bool:
        return self._call_video is not None and item.modality == Modality.MODALITY_VIDEO

    def _is_one_row(self, item: TowerInput) -> bool:
        """Mistral3Model loses a dimension where all it makes is one row."""
        return self._family.joining is Joining.PADDED and max(item.grid) <= _ONE_ROW

    def _is_one_of_several(self, item: TowerInput) -> bool:
        """The model takes it for one tile only if it is told of several images."""
        one = item.modality == Modality.MODALITY_IMAGE and item.tensors[0].shape[0] == 1
        return self._family.low_is_one_of_several and one

    def _pieces(self, item: TowerInput) -> int:
        """Elements of the call's result that belong to an item."""
        return len(item.tensors[1 if self._family.arguments else 0])


def build_tower(
    family: ImageFamily,
    config: Any,
    normalisations: Mapping[Modality, Normalisation],
    weights: TowerWeights,
    identity: bytes,
    dtype: torch.dtype,
    device: torch.device,
) -> Tower:
    """Puts weights that were read into transformers' model.

    Raises:
        SetupError: a weight is missing, left over, or of the wrong shape.
    """
    model = build_towers(family.model, config, weights, dtype, family.absent)
    return TransformersImageTower(
        model.to(device), family, family.frames(config), normalisations, dtype, device, weights.info, identity
    )


def _join(pixels: Sequence[torch.Tensor], joining: Joining) -> torch.Tensor:
    match joining:
        case Joining.TILES:
            return torch.cat(list(pixels))
        case Joining.STRIP:
            return torch.cat(list(pixels), dim=-1)
        case Joining.PADDED:
            height, width = (max(image.shape[side] for image in pixels) for side in (-2, -1))
            return torch.cat(
                [functional.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2])) for image in pixels]
            )


def _deal(pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Rows of pieces to the items that they belong to, one after another."""
    if len(pieces) != sum(counts):
        raise ValueError(f"the tower gave {len(pieces)} pieces for items of {list(counts)}")
    rows: list[tuple[torch.Tensor, ...]] = []
    start = 0
    for count in counts:
        rows.append((torch.cat([piece.flatten(0, -2) for piece in pieces[start : start + count]]),))
        start += count
    return rows
