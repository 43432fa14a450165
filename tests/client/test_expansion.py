"""Expanded prompts are what the families' processors in transformers write.

Processors with a video processor cannot be made without torchvision; their methods that write text can be called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from encoder_client.language import PlaceholderError
from encoder_client.language.families import FAMILIES
from encoder_client.language.family import RowToken
from encoder_client.language.placeholders import Vocabulary, expand
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, Int64List, PlaceholderValue, VideoMetadata
from epd.encoder.v1.media_pb2 import Modality

IMAGE, VIDEO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO
TIMES = (0.25, 1.749, 3723.05)
"""Of the temporal patches."""


@dataclass(frozen=True)
class Case:
    """A part, and the processor that writes its text."""

    family: str
    modality: Modality
    token: str
    """That one row fills."""
    rows: int
    grid: tuple[int, ...]
    expected: Callable[[], str]
    times: tuple[float, ...] = ()
    merge: int = 1
    values: tuple[PlaceholderValue, ...] = ()
    number: int = 0

    @property
    def chunk(self) -> EmbeddingChunk:
        return EmbeddingChunk(
            modality=self.modality,
            token_count=self.rows,
            grid_dim=self.grid,
            video=VideoMetadata(video_timestamps=self.times) if self.times else None,
            placeholder_metadata=self.values,
        )


def processor(kind: type[Any], **attributes: Any) -> Any:
    made = object.__new__(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def qwen3_vl() -> str:
    made = processor(
        Qwen3VLProcessor, video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>", video_token="V",
    )  # fmt: skip
    # Two frames a patch, at 1000 frames a second: their mean is the patch's time.
    frames = [round(1000 * time) for time in TIMES for _ in range(2)]
    metadata = SimpleNamespace(fps=1000, frames_indices=frames)
    inputs = {"video_grid_thw": torch.tensor([[3, 4, 6]]), "video_metadata": [metadata]}
    return str(made.replace_video_token(inputs, 0))


def glm(kind: type[Any]) -> Callable[[], str]:
    def write() -> str:
        made = processor(kind, video_processor=SimpleNamespace(merge_size=2), image_token="V")
        metadata = SimpleNamespace(fps=1, timestamps=[time for time in TIMES for _ in range(2)])
        inputs = {"video_grid_thw": np.array([[3, 4, 6]]), "video_metadata": [metadata]}
        return str(made.replace_video_token(inputs, 0))

    return write


def kimi() -> str:
    made = processor(
        Kimi_K25Processor, video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=4), video_token="V"
    )
    metadata = SimpleNamespace(fps=1, timestamps=[time for time in TIMES for _ in range(4)])
    grids = np.array([[4, 4, 6]] * 3)
    inputs = {"video_grid_thw": grids, "num_chunks_per_video": np.array([3]), "video_metadata": [metadata]}
    return str(made.replace_video_token(inputs, 0))


def internvl(kind: str) -> Callable[[], str]:
    def write() -> str:
        made = processor(
            InternVLProcessor, start_image_token="<img>", end_image_token="</img>", image_token="V", image_seq_length=4
        )
        if kind == "image":
            return str(made.replace_image_token({"num_patches": [3]}, 0))
        return str(made.replace_video_token({"pixel_values_videos": torch.zeros(1, 3, 1)}, 0))

    return write


def gemma3(crops: int) -> Callable[[], str]:
    def write() -> str:
        whole = f"\n\n<start_of_image>{'V' * 4}<end_of_image>\n\n"
        made = processor(Gemma3Processor, full_image_sequence=whole)
        return str(made.replace_image_token({"num_crops": [crops]}, 0))

    return write


SIZES, GRID = ((8, 4), *[(4, 8)] * 6), (2, 3)
"""In patches of an image and of its slices, and their rows and columns."""


def minicpm(kind: str, number: int, sizes: Any = SIZES, grid: tuple[int, int] = GRID) -> Callable[[], str]:
    def write() -> str:
        names = ("start", "end")
        tokens = {f"image_{name}_token": f"<{'/' * (name == 'end')}image>" for name in names}
        tokens |= {f"slice_{name}_token": f"<{'/' * (name == 'end')}slice>" for name in names}
        tokens |= {f"image_id_{name}_token": f"<{'/' * (name == 'end')}image_id>" for name in names}
        made = processor(
            MiniCPMV4_6Processor, slice_mode=True, video_slice_mode=True, image_token="V", video_token="V", **tokens
        )
        if kind == "image":
            inputs = {"grids": [grid], "num_patches_per_image": [len(sizes)], "target_sizes": torch.tensor(sizes)}
            text = made.replace_image_token(inputs, 0, image_token_divisor=16)
        else:
            inputs = {
                "grids_videos": np.array([grid] * 2),
                "num_frames_per_video": [2],
                "target_sizes_videos": np.array(list(sizes) * 2),
            }
            text = made.replace_video_token(inputs, 0, video_token_divisor=16)
        return str(made._prepend_local_ids(["M" * (number + 1)], [text] * (number + 1), "M")[number])

    return write


def lines(name: str, *values: tuple[int, int]) -> PlaceholderValue:
    return PlaceholderValue(name=name, ints=Int64List(values=np.array(values).flatten()), shape=[len(values), 2])


NUMBERED = PlaceholderValue(name="use_image_id", ints=Int64List(values=[1]), shape=[1])
SLICED = (lines("target_sizes", *SIZES), lines("grids", GRID), NUMBERED)
WHOLE = (lines("target_sizes", SIZES[0]), lines("grids", (0, 0)), NUMBERED)
FRAMES = (lines("target_sizes_videos", *SIZES, *SIZES), lines("grids_videos", GRID, GRID), NUMBERED)


def pixtral() -> str:
    # Its module cannot be imported without torchvision.
    return "VVVV[IMG_BREAK]VVVV[IMG_BREAK]VVVV[IMG_END]"


CASES = (
    Case("qwen3_vl", VIDEO, "V", 18, (3, 4, 6), qwen3_vl, TIMES),
    Case("glm4v", VIDEO, "V", 18, (3, 4, 6), glm(Glm4vProcessor), TIMES),
    Case("glm46v", VIDEO, "V", 18, (3, 4, 6), glm(Glm46VProcessor), TIMES),
    Case("kimi_k25", VIDEO, "V", 18, (12, 4, 6), kimi, TIMES),
    Case("internvl", IMAGE, "V", 12, (3,), internvl("image")),
    Case("internvl", VIDEO, "V", 12, (3,), internvl("video")),
    Case("gemma3", IMAGE, "V", 4, (1,), gemma3(0)),
    Case("gemma3", IMAGE, "V", 12, (3,), gemma3(2)),
    Case("mistral3", IMAGE, "V", 12, (6, 8), pixtral, merge=2),
    Case("minicpmv4_6", IMAGE, "V", 14, (1,), minicpm("image", 0), values=SLICED),
    Case("minicpmv4_6", IMAGE, "V", 2, (1,), minicpm("image", 3, SIZES[:1], (0, 0)), values=WHOLE, number=3),
    Case("minicpmv4_6", VIDEO, "V", 28, (2,), minicpm("video", 1), values=FRAMES, number=1),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{Modality.Name(case.modality)}-{case.rows}")
def test_texts_equal_the_processors(case: Case) -> None:
    token = RowToken(case.token, SimpleNamespace(spatial_merge_size=case.merge), number=case.number)
    written = FAMILIES[case.family].placeholders[case.modality].expand(token, case.chunk)
    assert written == case.expected()
    assert written.count("V") == case.rows + written.count("Video")


@pytest.mark.parametrize(
    ("family", "modality", "lacking"),
    [
        ("qwen3_vl", VIDEO, "video.video_timestamps"),
        ("kimi_k25", VIDEO, "video.video_timestamps"),
        ("internvl", VIDEO, "grid_dim"),
        ("minicpmv4_6", VIDEO, "target_sizes_videos"),
        ("gemma3", IMAGE, "grid_dim"),
        ("mistral3", IMAGE, "grid_dim"),
    ],
)
def test_what_a_layout_lacks_is_named(family: str, modality: Modality, lacking: str) -> None:
    place = FAMILIES[family].placeholders[modality]
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda _token: "V")
    config = SimpleNamespace(image_token_id=1, video_token_id=2)
    vocabulary = Vocabulary(FAMILIES[family], tokenizer, config, {})
    with pytest.raises(PlaceholderError, match=f"part 0 comes without .*{lacking}"):
        expand(vocabulary.prompt_token(place), [EmbeddingChunk(modality=modality, token_count=6)], vocabulary)
