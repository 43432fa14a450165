"""Sound in videos on the language side: where rows go, and at which positions, for Qwen2.5-Omni and Qwen3-Omni.

The whole models of transformers are the reference. Where they cannot be (videos with and without sound in one prompt),
a plain formulation is, which is held against them wherever they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationMixin

from encoder_client.language import LanguageOnlyModel, PlaceholderError
from encoder_client.language.family import RowToken
from encoder_client.language.sound_in_video import in_chunks, in_time
from encoder_svc.checkpoints import write_checkpoint
from epd.encoder.v1.embedding_pb2 import (
    AudioMetadata,
    ChunkState,
    DoubleList,
    EmbeddingChunk,
    Int64List,
    PlaceholderValue,
    TensorSpec,
)
from epd.encoder.v1.media_pb2 import Modality

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO
KINDS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
NEW_TOKENS = 6
OMNI = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def layout(
    index: int,
    modality: Modality,
    grid: Sequence[int],
    rows: int,
    *,
    frames: int = 0,
    sound: int = 0,
    step: float = 1.0,
) -> EmbeddingChunk:
    """What an encoder tells of a part; ``frames`` of mel and the rows of ``sound`` are those of a video."""
    chunk = EmbeddingChunk(
        part_idx=index, modality=modality, state=ChunkState.CHUNK_STATE_LAYOUT, grid_dim=grid, token_count=rows,
        tensors=[TensorSpec(name="embedding", shape=[rows, 1])],
    )  # fmt: skip
    if modality == AUDIO:
        chunk.audio.CopyFrom(AudioMetadata(mel_frames=frames))
        return chunk
    chunk.placeholder_metadata.add(name=f"{KINDS[modality]}_grid_thw", ints=Int64List(values=grid), shape=[1, 3])
    if modality == VIDEO:
        chunk.placeholder_metadata.add(name="video_second_per_grid", doubles=DoubleList(values=[step]), shape=[1])
    if sound:
        chunk.tensors.add(name="video_audio_embedding", shape=[sound, 1])
        chunk.placeholder_metadata.append(
            PlaceholderValue(name="audio_feature_lengths", ints=Int64List(values=[frames]), shape=[1])
        )
    return chunk


# Where rows stand, against the processors.


def processor_text(family: str, grid: Sequence[int], seconds: float, sound: int) -> str:
    """What the processor of transformers writes for a video with sound: its own method, on a stand-in for itself."""
    name = {"qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni_moe": "Qwen3OmniMoeProcessor"}[family]
    processor: Any = getattr(transformers, name)
    me = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        audio_bos_token="<", audio_eos_token=">", audio_token="A", video_token="V",
    )  # fmt: skip
    me.get_chunked_index = MethodType(processor.get_chunked_index, me)
    videos = {"video_grid_thw": np.array([grid]), "video_second_per_grid": [seconds]}
    rates = {"position_id_per_seconds": 25 if family == "qwen2_5_omni" else 13, "seconds_per_chunk": 2}
    text: str = processor.replace_video_with_audio_token(me, videos, 0, {"num_audio_tokens": [sound]}, 0, **rates)
    return text


@pytest.mark.parametrize("family", OMNI)
@settings(max_examples=200, deadline=None)
@given(
    steps=st.integers(1, 9),
    sides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 2 / 3]),
    sound=st.integers(1, 400),
)
def test_rows_stand_where_the_processor_has_them(
    family: str, steps: int, sides: tuple[int, int], seconds: float, sound: int
) -> None:
    grid = (steps, 2 * sides[0], 2 * sides[1])
    expand, rate = (in_chunks, 25) if family == "qwen2_5_omni" else (in_time, 13)
    marks = {"audio_token_id": "A", "audio_start_token_id": "<", "audio_end_token_id": ">"}
    token = RowToken("V", SimpleNamespace(position_id_per_seconds=rate, seconds_per_chunk=2), marks)
    chunk = layout(0, VIDEO, grid, steps * sides[0] * sides[1], frames=9, sound=sound, step=seconds)
    assert expand(token, chunk) == processor_text(family, grid, seconds, sound)


# What the model says, against the whole model.


@dataclass(frozen=True)
class Item:
    """One media item; a video with frames of mel sounds."""

    modality: Modality
    grid: tuple[int, int, int] = (1, 4, 4)
    frames: int = 0
    step: float = 1.0

    @property
    def rows(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] // 4


SOUNDING = Item(VIDEO, (5, 4, 6), frames=437, step=1.0)
SHORT = Item(VIDEO, (3, 4, 4), frames=120, step=2.0)
SILENT = Item(VIDEO, (4, 4, 4), step=0.5)
PICTURE = Item(IMAGE, (1, 6, 4))
SOUND = Item(AUDIO, frames=310)


@dataclass
class Omni:
    """Both sides of one family."""

    whole: Any
    language: LanguageOnlyModel

    def mel(self, item: Item, seed: int) -> torch.Tensor:
        return torch.randn(128, item.frames, generator=torch.Generator().manual_seed(seed))

    def pixels(self, item: Item, seed: int) -> torch.Tensor:
        width = self.whole.config.vision_config.patch_size**2 * 6
        return torch.randn(4 * item.rows, width, generator=torch.Generator().manual_seed(seed))

    def heard(self, item: Item, seed: int) -> torch.Tensor:
        mask = torch.ones(1, item.frames, dtype=torch.long)
        rows: torch.Tensor = self.whole.get_audio_features(self.mel(item, seed)[None], mask).last_hidden_state
        return rows

    def seen(self, item: Item, seed: int) -> torch.Tensor:
        features = self.whole.get_image_features if item.modality == IMAGE else self.whole.get_video_features
        output = features(self.pixels(item, seed), torch.tensor([item.grid]))
        levels = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output[0], *(level[0] for level in levels)], dim=-1)

    @torch.inference_mode()
    def parts(self, items: Sequence[Item]) -> tuple[list[EmbeddingChunk], list[Any]]:
        """LAYOUT and rows of each item, as an encoder has them."""
        layouts: list[EmbeddingChunk] = []
        rows: list[Any] = []
        for index, item in enumerate(items):
            heard = self.heard(item, index) if item.frames else None
            if item.modality == AUDIO:
                assert heard is not None
                layouts.append(layout(index, AUDIO, (item.frames,), len(heard), frames=item.frames))
                rows.append(heard)
                continue
            seen, sound = self.seen(item, index), 0 if heard is None else len(heard)
            layouts.append(
                layout(index, item.modality, item.grid, item.rows, frames=item.frames, sound=sound, step=item.step)
            )
            rows.append(seen if heard is None else (seen, heard))
        return layouts, rows

    def whole_answer(self, prompt: Any, items: Sequence[Item]) -> tuple[list[int], torch.Tensor]:
        arguments: dict[str, Any] = {}
        for kind, names in (
            (IMAGE, ("pixel_values", "image_grid_thw")),
            (VIDEO, ("pixel_values_videos", "video_grid_thw")),
        ):
            some = [(index, item) for index, item in enumerate(items) if item.modality == kind]
            if some:
                arguments[names[0]] = torch.cat([self.pixels(item, index) for index, item in some])
                arguments[names[1]] = torch.tensor([item.grid for _, item in some])
        heard = [(index, item) for index, item in enumerate(items) if item.frames]
        longest = max(item.frames for _, item in heard)
        features, mask = torch.zeros(len(heard), 128, longest), torch.zeros(len(heard), longest, dtype=torch.long)
        for place, (index, item) in enumerate(heard):
            features[place, :, : item.frames], mask[place, : item.frames] = self.mel(item, index), 1
        steps = torch.tensor([item.step for item in items if item.modality == VIDEO])
        with torch.inference_mode():
            answer: Any = GenerationMixin.generate(
                self.whole, input_ids=prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids), **arguments,
                input_features=features, feature_attention_mask=mask, video_second_per_grid=steps,
                use_audio_in_video=True, do_sample=False, max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        return answer.sequences[0, prompt.input_ids.shape[1] :].tolist(), answer.logits[0][0].float()

    def expand(self, items: Sequence[Item], layouts: Sequence[EmbeddingChunk]) -> Any:
        content = [{"type": KINDS[item.modality]} for item in items]
        return self.language.expand(
            [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}], layouts
        )


@pytest.fixture(scope="module", params=OMNI)
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    folder = tmp_path_factory.mktemp("omni") / request.param
    write_checkpoint(request.param, folder)
    whole = getattr(transformers, OMNI[request.param]).from_pretrained(folder, dtype=torch.float32).eval()
    return Omni(whole, LanguageOnlyModel.load(folder))


@pytest.mark.parametrize(
    "items",
    [(SOUNDING,), (SHORT, SOUNDING), (SOUND, SOUNDING, PICTURE, SHORT), (PICTURE, SHORT, SOUND)],
    ids=["one", "two", "among others", "with a sound behind it"],
)
def test_tokens_equal_the_whole_models_with_sound_in_videos(omni: Omni, items: tuple[Item, ...]) -> None:
    layouts, rows = omni.parts(items)
    prompt = omni.expand(items, layouts)
    tokens, logits = omni.whole_answer(prompt, items)
    answer = omni.language.generate(prompt, rows, max_new_tokens=NEW_TOKENS, first_logits=True)
    assert answer.first_logits is not None
    torch.testing.assert_close(answer.first_logits, logits, atol=1e-4, rtol=0)
    assert answer.token_ids == tokens


def positions_of(omni: Omni, prompt: Any) -> torch.Tensor:
    """As the language side gives them, shape (3, tokens)."""
    model: Any = omni.language._model
    values = prompt.values
    positions, delta = model.get_rope_index(
        prompt.input_ids, values.get("image_grid_thw"), values.get("video_grid_thw"),
        torch.ones_like(prompt.input_ids), True, values.get("audio_feature_lengths"),
        values.get("video_second_per_grid"),
    )  # fmt: skip
    assert delta.tolist() == [[positions.max() + 1 - prompt.input_ids.shape[1]]]
    found: torch.Tensor = positions[:, 0]
    return found


def plain_positions(omni: Omni, prompt: Any, items: Sequence[Item]) -> torch.Tensor:
    """Once more, token by token: text counts on; a row of a picture has its time, row and column; row k of a sound, k.

    In Qwen2.5-Omni times are whole numbers, and the two tokens on either side of a video with sound share a position.
    """
    first_family = "Qwen2_5" in type(omni.whole).__name__
    rate = omni.whole.config.position_id_per_seconds
    told = torch.full((3, prompt.input_ids.shape[1]), torch.nan)
    ends: dict[int, int] = {}
    shared: set[int] = set()
    for index, item in enumerate(items):
        of_part = {span.tensor: span.positions for span in prompt.spans if span.part_idx == index}
        seen = of_part["embedding"]
        heard = seen if item.modality == AUDIO else of_part.get("video_audio_embedding", ())
        for k, position in enumerate(heard):
            told[:, position] = k
        if item.modality != AUDIO:
            high, wide = item.grid[1] // 2, item.grid[2] // 2
            for n, position in enumerate(seen):
                time = n // (high * wide) * (item.step if item.modality == VIDEO else 1.0) * rate
                place = (int(time) if first_family else time, n // wide % high, n % wide)
                told[:, position] = torch.tensor(place)
        begin, last = min((*seen, *heard)), max((*seen, *heard))
        ends[begin] = last
        if first_family and item.modality == VIDEO and heard:
            shared |= {begin - 1, last + 2}
    position, after = 0, 0.0
    while position < told.shape[1]:
        end = ends.get(position)
        if end is None:
            after -= position in shared
            told[:, position] = after
            after, position = after + 1, position + 1
        else:
            told[:, position : end + 1] += after
            after, position = float(told[:, position : end + 1].max()) + 1, end + 1
    return told


@pytest.mark.parametrize(
    "items",
    [
        (SOUNDING, PICTURE, SOUND),
        (SILENT, SOUNDING),
        (SOUNDING, SILENT),
        (PICTURE, SOUND, SILENT, SOUND, SOUNDING, PICTURE, SHORT, SILENT, SOUND),
        (SOUND, SHORT, PICTURE, SILENT, SILENT, SOUNDING),
    ],
    ids=["all sound", "silent first", "silent last", "all kinds", "two silent ones"],
)
def test_f31_positions_of_silent_videos_among_sounding_ones(omni: Omni, items: tuple[Item, ...]) -> None:
    layouts, rows = omni.parts(items)
    prompt = omni.expand(items, layouts)
    found = positions_of(omni, prompt).float()
    torch.testing.assert_close(found, plain_positions(omni, prompt, items), atol=0, rtol=0)
    answer = omni.language.generate(prompt, rows, max_new_tokens=2, first_logits=True)
    for index, item in enumerate(items):
        if item.modality == VIDEO and item.frames:
            spoilt = [(one[0], one[1].flip(0)) if part == index else one for part, one in enumerate(rows)]
            other = omni.language.generate(prompt, spoilt, max_new_tokens=1, first_logits=True)
            assert answer.first_logits is not None
            assert other.first_logits is not None
            assert (answer.first_logits - other.first_logits).abs().max() > 1e-3, "its sound is not looked at"


def test_a_prompt_without_sound_in_videos_is_as_before(omni: Omni) -> None:
    items = (SILENT, SOUND, PICTURE)
    layouts, rows = omni.parts(items)
    prompt = omni.expand(items, layouts)
    assert [span.tensor for span in prompt.spans] == ["embedding"] * 3
    assert omni.language.generate(prompt, rows, max_new_tokens=2).token_ids


def test_f13_a_video_with_sound_whose_sound_is_missing_is_refused(omni: Omni) -> None:
    layouts, rows = omni.parts((SOUNDING,))
    prompt = omni.expand((SOUNDING,), layouts)
    with pytest.raises(PlaceholderError, match="part 0 comes without the rows of its sound"):
        omni.language.generate(prompt, [rows[0][0]])
    with pytest.raises(PlaceholderError, match="part 0 has shape"):
        omni.language.generate(prompt, [(rows[0][0], rows[0][1][:-1])])
    bare = EmbeddingChunk()
    bare.CopyFrom(layouts[0])
    bare.ClearField("placeholder_metadata")
    with pytest.raises(PlaceholderError, match="video_second_per_grid"):
        omni.expand((SOUNDING,), [bare])
