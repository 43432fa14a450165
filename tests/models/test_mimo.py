"""MiMo-V2 beyond what is the same for all families: lengths, forms, sound of videos, routing of weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.engine.runner import slot_matrices
from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import Layout, TowerInput
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.frame_sampling import FrameSampling
from encoder_svc.models.mimo_v2_config import MergerNorm, MimoAudio, MimoTokenizer, SinkForm
from encoder_svc.models.mimo_v2_lengths import codes_of, cut_units, rows_of
from encoder_svc.models.mimo_v2_mel import CHUNK_FRAMES, log_mel
from encoder_svc.models.mimo_v2_pixels import sample_distinct
from encoder_svc.models.registry import FAMILIES, check_servable, open_adapter
from epd.encoder.v1.media_pb2 import MediaItem, Modality, VideoOptions
from epd.internal.v1.engine_pb2 import BatchItem
from tests.models.cases.mimo import media, reference
from tests.models.family_cases import prepare, tower_inputs
from tests.models.mimo_reference import MimoReference

RATE = 24_000
WITH_SOUND = MediaItem(modality=Modality.MODALITY_VIDEO, video=VideoOptions(use_audio_in_video=True))


@dataclass(frozen=True)
class Track:
    """A sound track of samples that are there already."""

    samples: torch.Tensor
    source_sampling_rate: int = RATE
    source_channels: int = 1

    def waveform(self, sampling_rate: int) -> torch.Tensor:
        assert sampling_rate == RATE
        return self.samples


@dataclass(frozen=True)
class Scene:
    """A video of grey frames."""

    seconds: float
    audio: Track | None = None
    fps: float = 10.0
    width: int = 64
    height: int = 96

    @property
    def duration(self) -> float:
        return self.seconds

    @property
    def frame_times(self) -> Sequence[float]:
        return [number / self.fps for number in range(round(self.seconds * self.fps))]

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        for index in indices:
            yield torch.full((self.height, self.width, 3), 37 * index % 256, dtype=torch.uint8)


def noise(seconds: float, seed: int = 0) -> Track:
    """Noise whose colour changes."""
    samples = torch.randn(round(seconds * RATE), generator=torch.Generator().manual_seed(seed))
    return Track(0.2 * samples * torch.sin(torch.arange(len(samples)) / 3000).abs())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mimo") / "mimo_v2"
    write_checkpoint("mimo_v2", directory)
    return directory


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> Any:
    return open_adapter(checkpoint, "float32")


@pytest.fixture(scope="module")
def tower(adapter: Any) -> Any:
    return load(adapter)


@pytest.fixture(scope="module")
def plain_model(checkpoint: Path) -> MimoReference:
    return MimoReference(checkpoint)


def load(adapter: Any) -> Any:
    return adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)


def changed(checkpoint: Path, directory: Path, **vision: str) -> Path:
    """A copy of a checkpoint with other fields in ``vision_config``."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] |= vision
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def mel_of(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(seed)) * 2 - 5


# Mel


@pytest.mark.parametrize("samples", [1, 300, 480, 481, 4800, 12_345, (CHUNK_FRAMES + 3) * 240 + 7])
def test_mel_is_that_of_magnitudes_on_htks_scale(plain_model: MimoReference, samples: int) -> None:
    waveform = noise(samples / RATE).samples
    assert len(waveform) == samples
    levels = log_mel(waveform, MimoTokenizer())
    padded = torch.nn.functional.pad(waveform, (0, max(0, 481 - samples)))
    expected = plain_model.mel(padded.numpy())
    assert levels.shape == expected.shape == (128, len(padded) // 240 + 1)
    torch.testing.assert_close(levels, expected, atol=1e-3, rtol=0)


def test_silence_has_the_least_mel() -> None:
    assert log_mel(torch.zeros(2400), MimoTokenizer()).unique().tolist() == pytest.approx([-16.118096], abs=1e-5)


# Tokens


def test_published_rates() -> None:
    tokenizer, audio = MimoTokenizer(), MimoAudio()
    minute = 60 * RATE // 240 + 1
    assert minute == 6001
    assert codes_of(6000, tokenizer, 6000) == 1500
    assert rows_of(6000, tokenizer, audio) == 375
    assert rows_of(minute, tokenizer, audio) == 376
    # The formula for a sound of one segment, as the model's processor has it.
    for frames in range(1, 6001):
        convolved = (frames + 3 - 3 + 2 - 3) // 2 + 1
        codes = math.ceil(convolved / 2)
        assert rows_of(frames, tokenizer, audio) == math.ceil(codes / 4)


def test_lengths_are_those_that_come_and_no_sound_depends_on_another(tower: Any, adapter: Any) -> None:
    audio = MimoAudio(audio_segment_size=52)
    heard = tower._sound
    config, heard._config = heard._config, heard._config.model_copy(update={"audio_segment_size": 52})
    try:
        lengths = [*range(1, 25), 51, 52, 53, 54, 103, 104, 105, 160, 261]
        sounds = [mel_of(frames, frames) for frames in lengths]
        with torch.inference_mode():
            together = heard(sounds)
            alone = [heard([sound])[0] for sound in sounds]
    finally:
        heard._config = config
    for frames, rows, single in zip(lengths, together, alone, strict=True):
        assert len(rows) == rows_of(frames, MimoTokenizer(), audio), frames
        torch.testing.assert_close(rows, single, atol=1e-4, rtol=0)


def test_codes_are_the_nearest_entries_and_vary(tower: Any, plain_model: MimoReference) -> None:
    tokenizer = tower._sound._tokenizer
    segments = [mel_of(frames, frames) for frames in (77, 160, 1, 600)]
    with torch.inference_mode():
        features, lengths = tokenizer.features(segments)
        codes = tokenizer(segments)
    for segment, found, part in zip(segments, codes, features.split(lengths), strict=True):
        torch.testing.assert_close(part, plain_model.features(segment), atol=1e-4, rtol=0)
        assert torch.equal(found, plain_model.codes(segment))
    assert all(len(channel.unique()) > 8 for channel in codes[-1].T), "codes that hardly vary would prove nothing"


def test_the_tokenizer_stays_in_float32(checkpoint: Path) -> None:
    adapter = open_adapter(checkpoint, "bfloat16")
    tower: Any = load(adapter)
    mel = mel_of(160)
    assert tower._sound._tokenizer.features([mel])[0].dtype == torch.float32
    (rows,) = tower.encode([TowerInput(Modality.MODALITY_AUDIO, (160,), (mel,))])[0]
    assert rows.dtype == torch.bfloat16


def test_time_steps_of_a_group_see_each_other_both_ways(tower: Any) -> None:
    heard = tower._sound
    codes = torch.zeros(8, 4, dtype=torch.int64)
    later = codes.clone()
    later[3, 0] = 5
    layers, heard._projection, projection = heard._layers, [lambda x: x], heard._projection
    try:
        with torch.inference_mode():
            before, after = (heard.embed(steps).view(2, 4, -1) for steps in (codes, later))
    finally:
        heard._projection = projection
    assert len(layers) == 2
    moved = (before - after).abs().amax(dim=-1) > 1e-4
    assert moved.tolist() == [[True] * 4, [False] * 4]


# The two forms that no file tells


@pytest.mark.parametrize("sink_form", SinkForm)
@pytest.mark.parametrize("merger_norm", MergerNorm)
def test_every_form_is_the_reference_told_the_same(
    checkpoint: Path, tmp_path: Path, sink_form: SinkForm, merger_norm: MergerNorm
) -> None:
    directory = changed(checkpoint, tmp_path / "mimo_v2", sink_form=sink_form, merger_norm=merger_norm)
    adapter = open_adapter(directory, "float32")
    tower, model = load(adapter), MimoReference(directory)
    seen = [(medium, prepare(adapter, medium)) for medium in media()[:3]]
    with torch.inference_mode():
        made = [rows for (rows,) in tower.encode([prepared.input for _, prepared in seen])]
        expected = [reference(model, directory, medium, prepared) for medium, prepared in seen]
    for rows, other in zip(made, expected, strict=True):
        torch.testing.assert_close(rows, other, atol=1e-4, rtol=0)


def test_forms_give_other_rows_and_other_fingerprints(checkpoint: Path, tmp_path: Path, tower: Any) -> None:
    others = [
        load(open_adapter(changed(checkpoint, tmp_path / name, **{name: value}), "float32"))
        for name, value in (("sink_form", "softmax"), ("merger_norm", "rms_norm"))
    ]
    item = TowerInput(
        Modality.MODALITY_IMAGE, (1, 8, 8), (torch.arange(64 * 768).remainder(251).view(64, 768).to(torch.uint8),)
    )
    rows = [one.encode([item])[0][0] for one in (tower, *others)]
    assert all((rows[0] - other).abs().max() > 1e-2 for other in rows[1:])
    assert len({one.compatibility_fingerprint for one in (tower, *others)}) == 3


def test_the_operator_may_say_which_form_it_is(checkpoint: Path, tmp_path: Path) -> None:
    said = {"sink_form": "softmax", "merger_norm": "rms_norm"}
    check_servable(checkpoint, said)
    by_option = open_adapter(checkpoint, "float32", said)
    in_config = open_adapter(changed(checkpoint, tmp_path / "mimo_v2", **said), "float32")
    fingerprints = {load(adapter).compatibility_fingerprint for adapter in (by_option, in_config)}
    assert len(fingerprints) == 1
    assert FAMILIES["mimo_v2"].options == {"sink_form": tuple(SinkForm), "merger_norm": tuple(MergerNorm)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_form": "nowhere"}, "sink_form is 'nowhere'; use first_key or softmax"),
        ({"depth": "3"}, "mimo_v2 has no model option 'depth'; it has sink_form, merger_norm"),
    ],
)
def test_an_option_that_the_family_does_not_have_is_refused_at_start(
    checkpoint: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        check_servable(checkpoint, options)


# Frames


def test_frames_are_distinct_and_evenly_spread() -> None:
    by_rate = FrameSampling(1.0, None, 4, 3600, 2)
    assert list(sample_distinct(by_rate, 100, 10.0)) == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
    assert list(sample_distinct(by_rate, 110, 10.0)) == [0, 12, 24, 36, 48, 60, 72, 84, 96, 109]
    assert list(sample_distinct(by_rate, 1, 10.0)) == [0]
    assert list(sample_distinct(FrameSampling(None, 9, 4, 3600, 2), 3, 10.0)) == [0, 1, 2]


# Sound of videos


@pytest.mark.parametrize(
    ("times", "end", "rows", "expected"),
    [
        ((0.0, 2.0, 4.0), 6.0, 37, (12, 13, 12)),
        ((0.0, 2.0, 4.0), 6.0, 1000, (12, 13, 12)),
        ((0.0, 2.0, 4.0), 6.0, 20, (12, 8, 0)),
        ((0.0, 2.0, 4.0), 6.0, 12, (12, 0, 0)),
        ((0.0, 0.1, 0.2), 0.3, 5, (0, 1, 0)),
        ((0.0,), 1.0, 7, (6,)),
        ((0.0,), 0.1, 1, (0,)),
    ],
)
def test_f32_units_behind_the_end_of_a_track_have_no_rows(
    times: tuple[float, ...], end: float, rows: int, expected: tuple[int, ...]
) -> None:
    units = cut_units(times, end, rows, 6.25)
    assert units.lengths == expected
    assert units.start == 0
    assert units.shown <= rows


def layout_of(adapter: Any, scene: Scene, item: MediaItem = WITH_SOUND) -> tuple[Layout, list[TowerInput]]:
    layout = adapter.measure(item, scene)
    tensors = tuple(adapter.prepare(item, scene, layout))
    specs = [spec for taken in layout.inputs for spec in taken.tensors]
    assert [tuple(spec.shape) for spec in specs] == [tuple(tensor.shape) for tensor in tensors]
    ends = [spec.byte_offset + tensor.nbytes for spec, tensor in zip(specs, tensors, strict=True)]
    starts = [spec.byte_offset for spec in specs]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], layout.inputs[-1].nbytes], strict=True))
    return layout, tower_inputs(item.modality, layout, tensors)


SCENES = {
    "silent": Scene(6),
    "as long": Scene(6, noise(6, 1)),
    "shorter": Scene(6, noise(2.5, 2)),
    "longer": Scene(6, noise(15, 3)),
    "begins late": Scene(6, Track(torch.cat([torch.zeros(3 * RATE), noise(3, 4).samples]))),
    "one sample": Scene(6, Track(torch.ones(1))),
    "no sample": Scene(6, Track(torch.empty(0))),
    "one frame": Scene(0.1, noise(6, 5)),
}


@pytest.mark.parametrize("name", SCENES)
def test_f31_every_video_tells_of_its_sound(adapter: Any, name: str) -> None:
    scene = SCENES[name]
    layout, _ = layout_of(adapter, scene)
    chunk, sound = layout.chunk, layout.chunk.video.audio
    assert chunk.video.HasField("audio")
    lengths = list(sound.video_audio_segment_lens_flat)
    matrices = slot_matrices(BatchItem(tensors=chunk.tensors, nbytes=chunk.nbytes))
    if name in ("silent", "no sample"):
        assert (sound.video_audio_feature_lens, lengths, sound.video_audio_per_video_num_units) == (0, [], 0)
        assert len(matrices) == len(layout.inputs) == 1
        return
    assert sound.video_audio_per_video_num_units == len(lengths) == chunk.grid_dim[0]
    assert sum(lengths) <= sound.video_audio_feature_lens
    assert [tensor.name for tensor in chunk.tensors] == ["embedding", "video_audio_embedding"]
    assert list(chunk.tensors[1].shape) == [sum(lengths), adapter.hidden_size]
    assert chunk.tensors[1].byte_offset % 64 == 0
    assert list(matrices[1].shape) == [sum(lengths), adapter.hidden_size]
    times = list(chunk.video.video_timestamps)
    assert len(times) == chunk.grid_dim[0]
    expected = {
        # Six frames, at 0.0 and 1.1 s and so on up to 5.9 s, of two to a unit, which end at 7.0 s.
        "as long": (38, [14, 15, 9]),
        "shorter": (16, [14, 2, 0]),
        "longer": (94, [14, 15, 14]),
        "begins late": (38, [14, 15, 9]),
        "one sample": (1, [1, 0, 0]),
        "one frame": (38, [6]),
    }
    assert (sound.video_audio_feature_lens, lengths) == expected[name], times


def test_sound_that_is_not_asked_for_is_silent(adapter: Any) -> None:
    for options in (VideoOptions(), VideoOptions(num_frames=4)):
        item = MediaItem(modality=Modality.MODALITY_VIDEO, video=options)
        layout, _ = layout_of(adapter, SCENES["as long"], item)
        assert layout.chunk.video.HasField("audio")
        assert layout.chunk.video.audio.ByteSize() == 0
        assert len(layout.chunk.tensors) == 1
    assert not layout.prepared


def test_f31_each_sound_stays_with_its_video(adapter: Any, tower: Any, plain_model: MimoReference) -> None:
    found = [layout_of(adapter, scene) for scene in SCENES.values()]
    alone = mel_of(90, 9)
    heard = [sound for _, (_, *sounds) in found for sound in sounds]
    sounds = iter(tower.encode([TowerInput(Modality.MODALITY_AUDIO, (90,), (alone,)), *heard]))
    torch.testing.assert_close(next(sounds)[0], plain_model.hear(alone), atol=1e-4, rtol=0)
    pictures = tower.encode([seen for _, (seen, *_) in found])
    for (layout, inputs), (rows,) in zip(found, pictures, strict=True):
        chunk = layout.chunk
        assert list(rows.shape) == list(chunk.tensors[0].shape)
        torch.testing.assert_close(rows, tower.encode(inputs[:1])[0][0], atol=1e-4, rtol=0)
        for sound in inputs[1:]:
            (kept,) = next(sounds)
            assert list(kept.shape) == list(chunk.tensors[1].shape)
            whole = plain_model.hear(sound.tensors[0])
            assert len(whole) == chunk.video.audio.video_audio_feature_lens
            torch.testing.assert_close(kept, whole[: len(kept)], atol=1e-4, rtol=0)


# Weights


def test_f44_towers_and_language_side_share_nothing_and_lack_nothing(checkpoint: Path, tower: Any) -> None:
    opened, family = open_checkpoint(checkpoint), FAMILIES["mimo_v2"]
    eyes = set(opened.names(("visual.", "vision_model.")))
    ears = set(opened.names(("audio_", "speech_embeddings.")))
    language = set(opened.names(("model.", "lm_head.", "mtp")))
    assert eyes | ears == set(opened.names(family.prefixes))
    assert not eyes & ears
    assert not (eyes | ears) & language
    assert eyes | ears | language == set(opened.files)
    assert all((eyes, ears, language))
    assert len(set(opened.files.values())) == 3
    assert set(tower.weights.files) == {*opened.files.values(), "audio_tokenizer/model.safetensors"}
    tokens = opened.folder("audio_tokenizer").names(("",))
    assert tower.weights.tensors == len(eyes | ears) + len(tokens)


def test_names_of_other_releases_and_what_only_training_needs(checkpoint: Path, tmp_path: Path, tower: Any) -> None:
    directory = tmp_path / "mimo_v2"
    shutil.copytree(checkpoint, directory)
    weights = {name: tensor for file in sorted(directory.glob("model-*")) for name, tensor in load_file(file).items()}
    for file in directory.glob("model*"):
        file.unlink()
    renamed = {name.replace("visual.", "vision_model.", 1): tensor for name, tensor in weights.items()}
    renamed["audio_encoder.input_local_transformer.embed_tokens.weight"] = torch.zeros(3, 256)
    save_file(renamed, directory / "model.safetensors")
    codebooks = load_file(directory / "audio_tokenizer/model.safetensors")
    codebook = "encoder.quantizer.vq.layers.0._codebook."
    more = {f"{codebook}inited": torch.ones(1), f"{codebook}cluster_size": torch.ones(256)}
    more |= {f"{codebook}embed_avg": torch.zeros(256, 256), "decoder.layer_norm.weight": torch.zeros(256)}
    save_file(codebooks | more, directory / "audio_tokenizer/model.safetensors")
    other: Any = load(open_adapter(directory, "float32"))
    assert other.weights.tensors == tower.weights.tensors
    item = TowerInput(Modality.MODALITY_AUDIO, (90,), (mel_of(90),))
    assert torch.equal(other.encode([item])[0][0], tower.encode([item])[0][0])


def test_a_checkpoint_without_its_audio_tokenizer_is_refused_at_start(checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mimo_v2"
    shutil.copytree(checkpoint, directory)
    check_servable(directory)
    (directory / "audio_tokenizer/model.safetensors").unlink()
    with pytest.raises(SetupError, match="audio_tokenizer"):
        check_servable(directory)
    shutil.rmtree(directory / "audio_tokenizer")
    with pytest.raises(SetupError, match="no folder audio_tokenizer"):
        check_servable(directory)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("vision_config", "sink_form", "nowhere", "sink_form"),
        ("vision_config", "vit_window_attn_types", [0], "vit_window_attn_types"),
        ("audio_config", "out_hidden_size", 128, "out_hidden_size"),
        ("audio_config", "audio_channels", 5, "codebooks"),
        ("processor_config", "audio_sampling_rate", 16_000, "audio_sampling_rate"),
        ("processor_config", "temporal_compression_ratio", 2, "temporal_compression_ratio"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    checkpoint: Path, tmp_path: Path, section: str, field: str, value: object, message: str
) -> None:
    directory = tmp_path / "mimo_v2"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    config[section][field] = value
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=message):
        open_adapter(directory, "float32")
