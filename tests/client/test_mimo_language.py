"""MiMo-V2's language side: the layout of videos with sound, against a plain formulation, and the rows in it.

transformers has no MiMo-V2 with towers: the layout is checked by loops, and tokens against the same language model fed
by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationMixin

from encoder_client.language import LanguageOnlyModel, PlaceholderError
from encoder_client.language.family import RowToken
from encoder_client.language.sound_in_video import MIMO_MARKS, in_units
from encoder_svc.checkpoints import write_checkpoint
from epd.encoder.v1.embedding_pb2 import AudioMetadata, EmbeddingChunk, TensorSpec, VideoAudioMetadata
from epd.encoder.v1.media_pb2 import Modality

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO
KINDS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
NEW_TOKENS = 6
MARKS = dict(zip(MIMO_MARKS, "A(){}[]", strict=True))


def video(index: int, times: Sequence[float], rows: int, lengths: Sequence[int] = ()) -> EmbeddingChunk:
    """What an encoder tells of a video of so many rows a unit; ``lengths`` are those of its sound in each unit."""
    chunk = EmbeddingChunk(
        part_idx=index, modality=VIDEO, grid_dim=(len(times), 2, 2 * rows), token_count=rows * len(times)
    )
    chunk.tensors.append(TensorSpec(name="embedding", shape=[chunk.token_count, 1]))
    chunk.video.video_timestamps[:] = times
    chunk.video.audio.CopyFrom(VideoAudioMetadata())
    if lengths:
        chunk.video.audio.video_audio_segment_lens_flat[:] = lengths
        chunk.video.audio.video_audio_per_video_num_units = len(lengths)
        if sum(lengths):
            chunk.tensors.add(name="video_audio_embedding", shape=[sum(lengths), 1])
    return chunk


def plain_layout(times: Sequence[float], rows: int, lengths: Sequence[int], interleave: int, clocks: bool) -> str:
    """The same once more: windows of time, and what is in each."""
    written = "{"
    windows: list[list[int]] = []
    if interleave == 0:
        windows = [[unit] for unit in range(len(times))]
    elif interleave < 0:
        windows = [list(range(len(times)))]
    else:
        begin = 0
        while begin <= times[-1]:
            windows.append([unit for unit, time in enumerate(times) if begin <= time < begin + interleave])
            begin += interleave
    for window in windows:
        heard = 0
        for unit in window:
            minutes, seconds = divmod(int(times[unit]), 60)
            if clocks:
                written += str(minutes // 10) + str(minutes % 10) + ":" + str(seconds // 10) + str(seconds % 10)
            written += "[" + "V" * rows + "]"
            heard += lengths[unit] if lengths else 0
        if heard:
            written += "(" + "A" * heard + ")"
    return written + "}"


@given(
    gaps=st.lists(st.sampled_from([0.5, 1.0, 2.0, 2.2, 61.0]), max_size=8),
    rows=st.integers(1, 4),
    interleave=st.sampled_from([0, -1, 1, 2, 5, 60]),
    clocks=st.booleans(),
    data=st.data(),
)
def test_videos_are_laid_out_as_the_plain_formulation_says(
    gaps: list[float], rows: int, interleave: int, clocks: bool, data: st.DataObject
) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    lengths = data.draw(
        st.one_of(st.just([]), st.lists(st.integers(0, 14), min_size=len(times), max_size=len(times))), "lengths"
    )
    settings = {"video_audio_interleave_length": interleave, "use_video_timestamps": clocks}
    token = RowToken("V", SimpleNamespace(processor_config=settings), MARKS)
    assert in_units(token, video(0, times, rows, lengths)) == plain_layout(times, rows, lengths, interleave, clocks)


def test_a_shorter_track_has_no_marks_where_it_is_silent() -> None:
    settings = {"video_audio_interleave_length": 0, "use_video_timestamps": True}
    token = RowToken("V", SimpleNamespace(processor_config=settings), MARKS)
    assert in_units(token, video(0, (0.0, 2.2, 64.0), 1, (2, 1, 0))) == "{00:00[V](AA)00:02[V](A)01:04[V]}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo") / "mimo_v2"
    write_checkpoint("mimo_v2", folder)
    return folder


def test_f44_no_tower_is_read(checkpoint: Path) -> None:
    language = LanguageOnlyModel.load(checkpoint)
    towers = ("visual.", "audio_", "speech_embeddings.")
    left_out = set(language.weights.left_out)
    assert {name for name in left_out if not name.startswith("mtp")} == {
        name for name in left_out if name.startswith(towers)
    }
    assert {name.split(".")[0] for name in language.weights.tensors} == {"model", "lm_head"}


@pytest.mark.parametrize("interleave", [0, -1, 3])
def test_rows_of_every_part_stand_where_the_layout_says(checkpoint: Path, tmp_path: Path, interleave: int) -> None:
    folder = tmp_path / "mimo_v2"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["processor_config"]["video_audio_interleave_length"] = interleave
    (folder / "config.json").write_text(json.dumps(config))
    language = LanguageOnlyModel.load(folder)
    # Stand-alone sound between two videos with sound and a silent one: all sound fills the same token.
    sound = EmbeddingChunk(part_idx=1, modality=AUDIO, grid_dim=[56], token_count=4, audio=AudioMetadata(mel_frames=56))
    sound.tensors.add(name="embedding", shape=[4, 1])
    picture = EmbeddingChunk(part_idx=4, modality=IMAGE, grid_dim=[1, 4, 4], token_count=4)
    picture.tensors.add(name="embedding", shape=[4, 1])
    parts = [
        video(0, (0.0, 2.2, 4.4), 2, (14, 2, 0)),
        sound,
        video(2, (0.0, 1.0), 3),
        video(3, (0.0, 2.0), 1, (5, 7)),
        picture,
    ]
    messages = [{"role": "user", "content": [{"type": KINDS[chunk.modality]} for chunk in parts]}]
    prompt = language.expand(messages, parts)

    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, language.hidden_size, generator=generator)

    rows: list[Any] = [
        (noise(6), noise(16)), noise(4), noise(6), (noise(2), noise(12)), noise(4)
    ]  # fmt: skip
    ids = prompt.input_ids[0].tolist()
    tokens = config["processor_config"]
    embedded = language._model.get_input_embeddings()(prompt.input_ids).detach().clone()
    # Read from left to right: the next token of a kind takes the next row of that kind.
    seen = iter([row for index in (0, 2, 3) for row in (rows[index][0] if index != 2 else rows[2])])
    heard = iter([*rows[0][1], *rows[1], *rows[3][1]])
    shown = iter(rows[4])
    for position, token in enumerate(ids):
        for name, queue in (("video_token_id", seen), ("audio_token_id", heard), ("image_token_id", shown)):
            if token == tokens[name]:
                embedded[0, position] = next(queue)
    assert [next(queue, None) for queue in (seen, heard, shown)] == [None] * 3
    with torch.inference_mode():
        expected: Any = GenerationMixin.generate(
            language._model, input_ids=prompt.input_ids, inputs_embeds=embedded, do_sample=False,
            attention_mask=torch.ones_like(prompt.input_ids), max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    answer = language.generate(prompt, rows, max_new_tokens=NEW_TOKENS, first_logits=True)
    assert answer.first_logits is not None
    torch.testing.assert_close(answer.first_logits, expected.logits[0][0].float(), atol=1e-5, rtol=0)
    assert answer.token_ids == expected.sequences[0, len(ids) :].tolist()


def test_f13_lengths_that_do_not_fit_the_sound_are_refused(checkpoint: Path) -> None:
    language = LanguageOnlyModel.load(checkpoint)
    chunk = video(0, (0.0, 2.0), 1, (5, 7))
    chunk.video.audio.video_audio_segment_lens_flat[:] = (5, 8)
    with pytest.raises(PlaceholderError, match="cuts its sound into its units"):
        language.expand([{"role": "user", "content": [{"type": "video"}]}], [chunk])
