"""Any image family of transformers: the loaded tower, in transformers' own forward.

The images of a batch are joined into as few calls as their shapes allow, and what the call gives is dealt out again:
item → tiles → rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import Progress, Tower, TowerInput
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_families import ImageFamily, Joining, Pieces
from encoder_svc.models.image_preprocessing import ImageInputs, Normalisation
from encoder_svc.models.weights import build_towers, fingerprint, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

PREPROCESSING_VERSION = 1
"""Counts changes of this code that change embeddings."""

_ONE_ROW = 2
"""Patches of the side of a merge block."""

_Numbered = tuple[int, TowerInput]


class TransformersImageTower:
    """The loaded tower.

    Args:
        model: transformers' base model without its language model, on the device.
        family: how it is called.
        frames: how often a patch is repeated.
        normalisation: of pixels.
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
        normalisation: Normalisation,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightsInfo,
        compatibility_fingerprint: bytes,
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._call = getattr(model, family.method)
        self._family = family
        self._frames = frames
        self._normalisation = normalisation
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
            # Only tiles must be of one size; other pixels are made to fit.
            shape = tuple(item.tensors[0].shape[1:]) if self._family.joining is Joining.TILES else ()
            alike.setdefault((int(self._is_one_of_several(item)), *shape), []).append((number, item))
        for group in alike.values():
            count = self._family.items_a_call or len(group)
            for start in range(0, len(group), count):
                yield group[start : start + count]

    def _encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        if len(items) == 1 and (self._is_one_row(items[0]) or self._is_one_of_several(items[0])):
            return self._encode([items[0], items[0]])[:1]
        pixels = self._normalisation(_join([item.tensors[0] for item in items], self._family.joining).to(self._device))
        if self._frames > 1:
            # Rows of patches: channel, frame, row, column, as the first layer takes them.
            pixels = pixels.unsqueeze(2).expand(-1, -1, self._frames, -1).flatten(1)
        arguments = {
            name: torch.cat([item.tensors[place] for item in items]).to(self._device)
            for place, name in enumerate(self._family.arguments, 1)
        }
        if self._is_one_of_several(items[0]):
            arguments["batch_num_images"] = torch.tensor([len(items)])
        output = self._call(pixel_values=pixels.to(self._dtype), **arguments)
        if self._family.pooled_width is not None:
            return [
                (rows, pooled[None])
                for rows, pooled in zip(output.last_hidden_state, output.pooler_output, strict=True)
            ]
        return _deal(list(output.pooler_output), [self._pieces(item) for item in items])

    def _is_one_row(self, item: TowerInput) -> bool:
        """Mistral3Model loses a dimension where all it makes is one row."""
        return self._family.joining is Joining.PADDED and max(item.grid) <= _ONE_ROW

    def _is_one_of_several(self, item: TowerInput) -> bool:
        """The model takes it for one tile only if it is told of several images."""
        return self._family.low_is_one_of_several and item.tensors[0].shape[0] == 1

    def _pieces(self, item: TowerInput) -> int:
        match self._family.pieces:
            case Pieces.TILE:
                return item.tensors[0].shape[0]
            case Pieces.SLICE:
                return item.tensors[1 + self._family.arguments.index("target_sizes")].shape[0]
            case Pieces.ITEM:
                return 1


def load_tower(
    checkpoint: Checkpoint,
    family: ImageFamily,
    prefixes: Sequence[str],
    config: Any,
    inputs: ImageInputs,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Tower:
    """Reads the tower's weights and puts them on a device.

    Raises:
        SetupError: a weight is missing, left over, or of the wrong shape.
    """
    import transformers

    base_class = getattr(transformers, family.model, None)
    if base_class is None:
        raise SetupError(
            f"this version of transformers has no {family.model}; install the one that pyproject.toml pins"
        )
    weights = read_towers(checkpoint, prefixes, dtype, progress)
    model = build_towers(base_class, config, weights, dtype, family.absent)
    constants: Mapping[str, Any] = {"version": PREPROCESSING_VERSION, **inputs.constants}
    identity = fingerprint(weights, checkpoint.model_type, dtype, constants, family.width(config))
    return TransformersImageTower(
        model.to(device), family, family.frames(config), inputs.normalisation, dtype, device, weights.info, identity
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
