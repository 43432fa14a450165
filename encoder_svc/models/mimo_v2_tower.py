"""MiMo-V2's two towers on a device: images and videos, and sound, alone or of a video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from encoder_svc.models.adapter import Progress, TowerInput
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.mimo_v2_audio import SoundForward
from encoder_svc.models.mimo_v2_audio_tokenizer import AudioTokenizer
from encoder_svc.models.mimo_v2_config import MimoAudio, MimoTokenizer, MimoVision
from encoder_svc.models.mimo_v2_parameters import SpeechTower, TokenizerEncoder, VisionTower
from encoder_svc.models.mimo_v2_vision import VisionForward
from encoder_svc.models.placing import place_weights
from encoder_svc.models.qwen_vision import QwenVision
from encoder_svc.models.registry import FAMILIES
from encoder_svc.models.weights import TowerWeights, fingerprint, read_towers
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import Modality

PREPROCESSING_VERSION = 1
"""Counts changes of this family's code that change embeddings."""

TOKENIZER_FOLDER = "audio_tokenizer"

VISION_PREFIXES = ("visual.", "vision_model.")

_UNUSED = (
    "input_local_transformer.embed_tokens.weight",
    "._codebook.inited",
    "._codebook.cluster_size",
    "._codebook.embed_avg",
)
"""How the names of tensors end that only training needed. Some checkpoints have them."""


@dataclass(frozen=True)
class TowerConfig:
    """What decides the towers, beside their weights."""

    vision: MimoVision
    pixels: QwenVision
    audio: MimoAudio
    tokenizer: MimoTokenizer


class MimoV2Tower:
    """The loaded towers.

    Args:
        vision: of images and videos.
        sound: of sound.
        weights: what was read.
        compatibility_fingerprint: 32 bytes.
    """

    def __init__(
        self, vision: VisionForward, sound: SoundForward, weights: WeightsInfo, compatibility_fingerprint: bytes
    ) -> None:
        self.weights = weights
        self.compatibility_fingerprint = compatibility_fingerprint
        self._vision = vision
        self._sound = sound

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`.

        What is seen are patches; what is heard is mel, and of a video's sound also the first row and the number of rows
        that are kept.
        """
        if items[0].modality != Modality.MODALITY_AUDIO:
            patches = [item.tensors[0] for item in items]
            return [(rows,) for rows in self._vision(patches, [(t, h, w) for t, h, w in (item.grid for item in items)])]
        heard = self._sound([item.tensors[0] for item in items])
        return [(_kept(rows, item),) for rows, item in zip(heard, items, strict=True)]


def _kept(rows: torch.Tensor, item: TowerInput) -> torch.Tensor:
    if len(item.tensors) == 1:
        return rows
    start, kept = item.tensors[1].tolist()
    return rows[start : start + kept]


def load_tower(
    checkpoint: Checkpoint, config: TowerConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> MimoV2Tower:
    """Reads the towers of a checkpoint onto a device.

    Raises:
        SetupError: config or weights are wrong; the message says what to change.
    """
    family = FAMILIES["mimo_v2"]
    read = read_towers(_without_unused(checkpoint), family.prefixes, dtype, progress)
    folder = _without_unused(checkpoint.folder(TOKENIZER_FOLDER))
    tokens = read_towers(folder, family.folders[TOKENIZER_FOLDER], torch.float32, progress)
    together = TowerWeights(
        state={**read.state, **{f"{TOKENIZER_FOLDER}/{name}": tensor for name, tensor in tokens.state.items()}},
        tensors=(
            *read.tensors,
            *(replace(tensor, name=f"{TOKENIZER_FOLDER}/{tensor.name}") for tensor in tokens.tensors),
        ),
        files=(*read.files, *(f"{TOKENIZER_FOLDER}/{file}" for file in tokens.files)),
    )
    identity = fingerprint(
        together,
        family.model_type,
        dtype,
        {
            "version": PREPROCESSING_VERSION,
            **config.pixels.identity,
            "forms": [config.vision.sink_form, config.vision.merger_norm],
            "audio": config.audio.model_dump(),
            "tokenizer": config.tokenizer.model_dump(),
        },
        config.vision.out_hidden_size,
    )
    info = together.info
    eyes = place_weights(lambda: VisionTower(config.vision), _part(read, VISION_PREFIXES, True), VISION_PREFIXES)
    ears = place_weights(lambda: SpeechTower(config.audio), _part(read, VISION_PREFIXES, False), ("",))
    encoder = place_weights(lambda: TokenizerEncoder(config.tokenizer), tokens, family.folders[TOKENIZER_FOLDER])
    # They refer to every tensor, and the towers below keep their own.
    del read, tokens, together
    vision = VisionForward(eyes, config.vision, config.pixels.image, config.pixels.video, device)
    sound = SoundForward(ears, config.audio, AudioTokenizer(encoder, config.tokenizer, device), device)
    progress("moving weights", 1.0)
    return MimoV2Tower(vision, sound, info, identity)


def _without_unused(checkpoint: Checkpoint) -> Checkpoint:
    files = {name: file for name, file in checkpoint.files.items() if not name.endswith(_UNUSED)}
    return replace(checkpoint, files=files)


def _part(weights: TowerWeights, prefixes: tuple[str, ...], inside: bool) -> TowerWeights:
    """The tensors whose names begin, or do not begin, with one of ``prefixes``."""
    state = {name: tensor for name, tensor in weights.state.items() if name.startswith(prefixes) is inside}
    return replace(weights, state=state)
