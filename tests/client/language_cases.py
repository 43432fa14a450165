"""For each family: media as transformers' whole model takes them, what its tower makes of them, and their LAYOUTs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from epd.encoder.v1.embedding_pb2 import (
    AudioMetadata,
    ChunkState,
    DoubleList,
    EmbeddingChunk,
    Int64List,
    PlaceholderValue,
    VideoMetadata,
)
from epd.encoder.v1.media_pb2 import Modality
from tests.models.whole_kimi_vl import load_whole_kimi_vl

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO


@dataclass(frozen=True)
class Part:
    """One media item: its LAYOUT, and its rows as the whole model's tower makes them."""

    modality: Modality
    rows: torch.Tensor
    """Shape (rows, width · (1 + levels))."""
    grid: tuple[int, ...]
    values: tuple[PlaceholderValue, ...] = ()
    timestamps: tuple[float, ...] = ()
    mel_frames: int = 0

    def layout(self, index: int, width: int) -> EmbeddingChunk:
        chunk = EmbeddingChunk(
            part_idx=index,
            modality=self.modality,
            state=ChunkState.CHUNK_STATE_LAYOUT,
            grid_dim=self.grid,
            token_count=self.rows.shape[0],
            placeholder_metadata=self.values,
        )
        if self.modality == VIDEO:
            chunk.video.CopyFrom(VideoMetadata(video_timestamps=self.timestamps))
        if self.modality == AUDIO:
            chunk.audio.CopyFrom(AudioMetadata(mel_frames=self.mel_frames))
        return chunk


@dataclass(frozen=True)
class Media:
    """Some items for one prompt."""

    parts: tuple[Part, ...]
    arguments: dict[str, Any]
    """What the whole model takes instead."""

    def __add__(self, other: Media) -> Media:
        return Media(self.parts + other.parts, self.arguments | other.arguments)


MakeMedia = Callable[[Any], Media]
"""Makes media for a whole model."""


@dataclass(frozen=True)
class LanguageCase:
    """One prompt of one family."""

    family: str
    whole: str
    """The class of transformers; empty where it has none, and ``load`` does."""
    media: MakeMedia
    name: str = ""
    type_ids: str | None = None
    """The argument of the whole model that takes the marks of placeholders."""
    text: str | None = None
    """The prompt, where messages do not make it."""
    bfloat16: bool = False
    load: Callable[[Path, torch.dtype], Any] | None = None

    def load_whole(self, checkpoint: Path, dtype: torch.dtype) -> Any:
        """The whole model, in evaluation mode."""
        if self.load is not None:
            return self.load(checkpoint, dtype)
        return getattr(transformers, self.whole).from_pretrained(checkpoint, dtype=dtype).eval()

    @property
    def title(self) -> str:
        return f"{self.family}-{self.name}" if self.name else self.family


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ints(name: str, values: Sequence[int]) -> PlaceholderValue:
    return PlaceholderValue(name=name, ints=Int64List(values=values), shape=[1, len(values)])


def _seconds(name: str, value: float) -> PlaceholderValue:
    return PlaceholderValue(name=name, doubles=DoubleList(values=[value]), shape=[1])


def _joined(output: Any) -> list[torch.Tensor]:
    """Each item's rows with its deepstack tensors beside them."""
    levels = getattr(output, "deepstack_features", None) or []
    return [
        torch.cat([rows, *(level[index] for level in levels)], dim=-1)
        for index, rows in enumerate(output.pooler_output)
    ]


def grid_images(*grids: tuple[int, int, int], patch: int = 14) -> MakeMedia:
    """Patches of images, as the Qwen-VL kin take them."""

    def make(model: Any) -> Media:
        pixels, grid = _noise(sum(t * h * w for t, h, w in grids), 6 * patch**2, seed=1), torch.tensor(grids)
        rows = _joined(model.get_image_features(pixels.to(model.dtype), grid))
        parts = [
            Part(IMAGE, item, size, (_ints("image_grid_thw", size),)) for item, size in zip(rows, grids, strict=True)
        ]
        return Media(tuple(parts), {"pixel_values": pixels, "image_grid_thw": grid})

    return make


def grid_videos(*grids: tuple[int, int, int], patch: int = 14, seconds: str = "") -> MakeMedia:
    """Patches of videos. ``seconds`` names the value and argument for the time between temporal patches."""

    def make(model: Any) -> Media:
        pixels, grid = _noise(sum(t * h * w for t, h, w in grids), 6 * patch**2, seed=2), torch.tensor(grids)
        rows = _joined(model.get_video_features(pixels.to(model.dtype), grid))
        steps = [0.5 + 0.75 * number for number in range(len(grids))]
        parts = []
        for item, size, step in zip(rows, grids, steps, strict=True):
            values = [_ints("video_grid_thw", size), *([_seconds(seconds, step)] if seconds else [])]
            times = tuple(0.25 + step * number for number in range(size[0]))
            parts.append(Part(VIDEO, item, size, tuple(values), times))
        more = {seconds: torch.tensor(steps)} if seconds else {}
        return Media(tuple(parts), {"pixel_values_videos": pixels, "video_grid_thw": grid, **more})

    return make


def omni_sounds(*frames: int) -> MakeMedia:
    """Mel spectrograms of the Omni families."""

    def make(model: Any) -> Media:
        features, mask = _noise(len(frames), 128, max(frames), seed=3), torch.zeros(len(frames), max(frames))
        parts = []
        for index, length in enumerate(frames):
            mask[index, :length] = 1
            alone = features[index : index + 1, :, :length].to(model.dtype)
            rows = model.get_audio_features(alone, torch.ones(1, length, dtype=torch.long)).last_hidden_state
            parts.append(Part(AUDIO, rows, (length,), mel_frames=length))
        return Media(tuple(parts), {"input_features": features, "feature_attention_mask": mask.long()})

    return make


def qwen2_audio_sounds(*frames: int) -> MakeMedia:
    """Mel spectrograms of 30 s, valid up to some frame."""

    def make(model: Any) -> Media:
        features, mask = _noise(len(frames), 128, 3000, seed=4), torch.zeros(len(frames), 3000, dtype=torch.long)
        for index, length in enumerate(frames):
            mask[index, :length] = 1
        made: list[torch.Tensor] = []
        hook = model.model.multi_modal_projector.register_forward_hook(lambda _module, _inputs, out: made.append(out))
        counts = [((length - 1) // 2 + 1 - 2) // 2 + 1 for length in frames]
        token = model.config.audio_token_id
        model(
            input_ids=torch.full((1, sum(counts)), token),
            input_features=features.to(model.dtype),
            feature_attention_mask=mask,
        )
        hook.remove()
        parts = [
            Part(AUDIO, made[0][index, :count], (length,), mel_frames=length)
            for index, (count, length) in enumerate(zip(counts, frames, strict=True))
        ]
        return Media(tuple(parts), {"input_features": features, "feature_attention_mask": mask})

    return make


def voxtral_sounds(*windows: int) -> MakeMedia:
    """Sounds of some windows of 30 s each."""

    def make(model: Any) -> Media:
        features = _noise(sum(windows), 128, 3000, seed=5)
        rows = model.get_audio_features(features.to(model.dtype)).pooler_output
        parts = [
            Part(AUDIO, item, (3000 * count,), mel_frames=3000 * count)
            for item, count in zip(rows.split([375 * count for count in windows]), windows, strict=True)
        ]
        return Media(tuple(parts), {"input_features": features})

    return make


def masked_sounds(*frames: int) -> MakeMedia:
    """Mel spectrograms of 30 s, valid up to some frame, which ``get_audio_features`` takes with a mask."""

    def make(model: Any) -> Media:
        features, mask = _noise(len(frames), 128, 3000, seed=9), torch.zeros(len(frames), 3000, dtype=torch.long)
        parts = []
        for index, length in enumerate(frames):
            mask[index, :length] = 1
            alone = features[index : index + 1].to(model.dtype), mask[index : index + 1]
            parts.append(Part(AUDIO, model.get_audio_features(*alone).pooler_output, (3000,), mel_frames=length))
        return Media(tuple(parts), {"input_features": features, "input_features_mask": mask})

    return make


def whisper_sound(model: Any) -> Media:
    """One window of 30 s."""
    features = _noise(1, 80, 3000, seed=6)
    rows = model.model.encoder(features.to(model.dtype)).last_hidden_state[0]
    return Media((Part(AUDIO, rows, (3000,), mel_frames=3000),), {"input_features": features})


def tiled_images(*tiles: int, edge: int) -> MakeMedia:
    """Images of some tiles each."""

    def make(model: Any) -> Media:
        pixels = _noise(sum(tiles), 3, edge, edge, seed=7)
        output = model.get_image_features(pixel_values=pixels.to(model.dtype)).pooler_output
        rows = output if isinstance(output, torch.Tensor) else torch.stack(list(output))
        rows = rows.reshape(sum(tiles), -1, rows.shape[-1])
        parts = [
            Part(IMAGE, item.flatten(0, 1), (count,)) for item, count in zip(rows.split(tiles), tiles, strict=True)
        ]
        return Media(tuple(parts), {"pixel_values": pixels})

    return make


def tiled_video(frames: int, edge: int) -> MakeMedia:
    """A video whose frames are tiles to the tower, as InternVL has it."""

    def make(model: Any) -> Media:
        [part] = tiled_images(frames, edge=edge)(model).parts
        return Media((Part(VIDEO, part.rows, part.grid),), {"pixel_values": _noise(frames, 3, edge, edge, seed=7)})

    return make


def sized_images(*sizes: tuple[int, int], patch: int = 14) -> MakeMedia:
    """Images of their own size, padded, as Pixtral has them."""

    def make(model: Any) -> Media:
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        pixels = torch.zeros(len(sizes), 3, height, width)
        for index, (h, w) in enumerate(sizes):
            pixels[index, :, :h, :w] = _noise(3, h, w, seed=8 + index)
        arguments = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
        rows = model.get_image_features(pixels.to(model.dtype), torch.tensor(sizes)).pooler_output
        parts = [Part(IMAGE, item, (h // patch, w // patch)) for item, (h, w) in zip(rows, sizes, strict=True)]
        return Media(tuple(parts), arguments)

    return make


def anyres_images(*sizes: tuple[int, int], edge: int) -> MakeMedia:
    """Images of any resolution, as LLaVA-OneVision has them: tiles of the whole image and its parts."""

    def make(model: Any) -> Media:
        tiles = [1 + -(-h // edge) * -(-w // edge) for h, w in sizes]
        pixels = torch.zeros(len(sizes), max(tiles), 3, edge, edge)
        for index, count in enumerate(tiles):
            pixels[index, :count] = _noise(count, 3, edge, edge, seed=20 + index)
        arguments = {
            "pixel_values": pixels,
            "image_sizes": torch.tensor(sizes),
            "batch_num_images": torch.ones(len(sizes), dtype=torch.long),
        }
        output = model.get_image_features(
            pixels.to(model.dtype), arguments["image_sizes"], batch_num_images=arguments["batch_num_images"]
        )
        parts = [Part(IMAGE, item, (count,)) for item, count in zip(output.pooler_output, tiles, strict=True)]
        return Media(tuple(parts), arguments)

    return make


def pooled_video(frames: int, edge: int) -> MakeMedia:
    """A video of LLaVA-OneVision: frames pooled, one more row at the end."""

    def make(model: Any) -> Media:
        pixels = _noise(1, frames, 3, edge, edge, seed=30)
        rows = model.get_video_features(pixels.to(model.dtype)).pooler_output.flatten(0, 1)
        return Media((Part(VIDEO, rows, (frames,)),), {"pixel_values_videos": pixels})

    return make


def moon_images(*grids: tuple[int, int, int]) -> MakeMedia:
    """Patches of images, as Kimi K2.5 takes them."""

    def make(model: Any) -> Media:
        pixels, grid = _noise(sum(t * h * w for t, h, w in grids), 3, 14, 14, seed=40), torch.tensor(grids)
        rows = model.get_image_features(pixels.to(model.dtype), grid).pooler_output
        parts = [Part(IMAGE, item, size) for item, size in zip(rows, grids, strict=True)]
        return Media(tuple(parts), {"pixel_values": pixels, "image_grid_thw": grid})

    return make


def moon_video(*grids: tuple[int, int, int]) -> MakeMedia:
    """The chunks of a video, as Kimi K2.5 takes them."""

    def make(model: Any) -> Media:
        pixels, grid = _noise(sum(t * h * w for t, h, w in grids), 3, 14, 14, seed=41), torch.tensor(grids)
        rows = torch.cat(list(model.get_video_features(pixels.to(model.dtype), grid).pooler_output))
        times = tuple(3601.25 + 2.0 * number for number in range(len(grids)))
        part = Part(VIDEO, rows, (sum(t for t, _, _ in grids), *grids[0][1:]), timestamps=times)
        return Media((part,), {"pixel_values_videos": pixels, "video_grid_thw": grid})

    return make


def strip(*sizes: tuple[int, int], seed: int) -> torch.Tensor:
    """Patches of images and slices of some sizes, beside each other."""
    return _noise(1, 3, 14, 14 * sum(height * width for height, width in sizes), seed=seed)


def _lines(name: str, values: Sequence[tuple[int, int]]) -> PlaceholderValue:
    return PlaceholderValue(name=name, ints=Int64List(values=torch.tensor(values).flatten()), shape=[len(values), 2])


_NUMBERED = PlaceholderValue(name="use_image_id", ints=Int64List(values=[1]), shape=[1])


def sliced_images(*images: tuple[tuple[int, int], ...], grids: Sequence[tuple[int, int]]) -> MakeMedia:
    """Images, each with its slices, as MiniCPM-V takes them. Sizes are in patches."""

    def make(model: Any) -> Media:
        every = [size for image in images for size in image]
        pixels, sizes = strip(*every, seed=50), torch.tensor(every)
        rows = iter(model.get_image_features(pixels.to(model.dtype), sizes).pooler_output)
        parts = [
            Part(
                IMAGE,
                torch.cat([next(rows) for _ in image]),
                (1,),
                (_lines("target_sizes", image), _lines("grids", [grid]), _NUMBERED),
            )
            for image, grid in zip(images, grids, strict=True)
        ]
        return Media(tuple(parts), {"pixel_values": pixels, "target_sizes": sizes})

    return make


def sliced_video(frames: int, frame: tuple[tuple[int, int], ...], grid: tuple[int, int]) -> MakeMedia:
    """A video whose frames are cut into slices, as MiniCPM-V takes it."""

    def make(model: Any) -> Media:
        every = list(frame) * frames
        pixels, sizes = strip(*every, seed=51), torch.tensor(every)
        rows = torch.cat(list(model.get_video_features(pixels.to(model.dtype), sizes).pooler_output))
        values = _lines("target_sizes_videos", every), _lines("grids_videos", [grid] * frames), _NUMBERED
        arguments = {"pixel_values_videos": pixels, "target_sizes_videos": sizes}
        return Media((Part(VIDEO, rows, (frames,), values),), arguments)

    return make


def both(*makers: MakeMedia) -> MakeMedia:
    """One prompt with all of them."""

    def make(model: Any) -> Media:
        first, *others = (maker(model) for maker in makers)
        for other in others:
            first = first + other
        return first

    return make


_IMAGES, _VIDEOS = ((1, 6, 8), (1, 4, 4)), ((3, 4, 6), (2, 4, 4))
_TYPED = "mm_token_type_ids"


def _qwen3(family: str, whole: str) -> LanguageCase:
    media = both(grid_images(*_IMAGES, patch=16), grid_videos(*_VIDEOS, patch=16))
    return LanguageCase(family, whole, media, type_ids=_TYPED, bfloat16=not family.startswith("qwen3_5"))


def _omni(family: str, whole: str, patch: int, bfloat16: bool) -> LanguageCase:
    media = both(
        omni_sounds(100, 260),
        grid_images(*_IMAGES, patch=patch),
        grid_videos(*_VIDEOS, patch=patch, seconds="video_second_per_grid"),
    )
    return LanguageCase(family, whole, media, bfloat16=bfloat16)


def _glm(family: str, whole: str) -> tuple[LanguageCase, LanguageCase]:
    # The whole model cannot take both in one prompt: rows of both fill the same token.
    return (
        LanguageCase(family, whole, grid_images(*_IMAGES), "image", _TYPED),
        LanguageCase(family, whole, grid_videos(*_VIDEOS), "video", _TYPED),
    )


CASES: tuple[LanguageCase, ...] = (
    LanguageCase(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        both(grid_images(*_IMAGES), grid_videos(*_VIDEOS)),
        type_ids=_TYPED,
        bfloat16=True,
    ),
    LanguageCase(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        both(grid_images(*_IMAGES), grid_videos(*_VIDEOS, seconds="second_per_grid_ts")),
        type_ids=_TYPED,
        bfloat16=True,
    ),
    _qwen3("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    _qwen3("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    _qwen3("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    _qwen3("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    _omni("qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration", 14, bfloat16=True),
    _omni("qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration", 16, bfloat16=False),
    LanguageCase("qwen2_audio", "Qwen2AudioForConditionalGeneration", qwen2_audio_sounds(3000, 417), bfloat16=True),
    LanguageCase("voxtral", "VoxtralForConditionalGeneration", voxtral_sounds(1, 2)),
    LanguageCase("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", masked_sounds(3000, 417)),
    LanguageCase("glmasr", "GlmAsrForConditionalGeneration", masked_sounds(3000, 417)),
    LanguageCase(
        "whisper",
        "WhisperForConditionalGeneration",
        whisper_sound,
        text="<|startoftranscript|><|en|><|transcribe|><|notimestamps|>",
    ),
    LanguageCase(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        both(moon_images((1, 4, 6), (1, 6, 4)), moon_video((4, 4, 4), (3, 4, 4))),
    ),
    LanguageCase("kimi_vl", "", moon_images((1, 4, 6), (1, 6, 4)), load=load_whole_kimi_vl),
    LanguageCase(
        "minicpmv4_6",
        "MiniCPMV4_6ForConditionalGeneration",
        both(
            sliced_images(((8, 8), (4, 8), (4, 8)), ((8, 4),), grids=((2, 1), (0, 0))),
            sliced_video(2, ((4, 4), (4, 8), (4, 8)), (1, 2)),
        ),
    ),
    LanguageCase("internvl", "InternVLForConditionalGeneration", tiled_images(1, 3, edge=112), "image"),
    LanguageCase("internvl", "InternVLForConditionalGeneration", tiled_video(3, edge=112), "video"),
    LanguageCase("llava", "LlavaForConditionalGeneration", tiled_images(1, 1, edge=112)),
    LanguageCase(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        both(anyres_images((200, 90), (130, 260), edge=130), pooled_video(2, edge=130)),
    ),
    LanguageCase("gemma3", "Gemma3ForConditionalGeneration", tiled_images(1, 3, edge=224), type_ids="token_type_ids"),
    LanguageCase("mistral3", "Mistral3ForConditionalGeneration", sized_images((84, 112), (56, 140))),
    *_glm("glm4v", "Glm4vForConditionalGeneration"),
    *_glm("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
    *_glm("glm46v", "Glm46VForConditionalGeneration"),
)
