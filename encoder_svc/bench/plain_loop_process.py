"""The process of the plain loop: transformers alone, one item at a time.

Run as ``python -m encoder_svc.bench.plain_loop_process`` by :mod:`encoder_svc.bench.plain_loop`. Commands and answers
are lines of JSON.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

# As the engine's, before torch is imported: threads that spin while they wait would slow whatever runs beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from PIL import Image
from transformers import AutoModel, Qwen2VLImageProcessorPil

from encoder_svc.bench.media import SAMPLED_FPS

Encode = Callable[[Path], torch.Tensor]
"""From a file to its rows, on the model's device."""


def main() -> None:
    """Loads, says so, then answers each command until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("media", type=Path, help="folder of files")
    parser.add_argument("--medium", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, arguments.dtype)
    model: Any = AutoModel.from_pretrained(arguments.model, dtype=dtype).eval().to(arguments.device)
    model = getattr(model, "thinker", model)
    make = {"image": image_loop, "video": video_loop, "audio": audio_loop}[arguments.medium]
    encode = make(model, arguments.model, dtype, arguments.device)
    files = itertools.cycle(sorted(arguments.media.iterdir()))
    with torch.inference_mode():
        encode(next(files)).cpu()
        _answer({"transformers": transformers.__version__})
        for line in sys.stdin:
            command = json.loads(line)
            begun = monotonic()
            images = 0
            while images < command["images"] if command["images"] else monotonic() - begun < command["seconds"]:
                encode(next(files)).cpu()
                images += 1
            _answer({"images": images, "seconds": monotonic() - begun})


def image_loop(model: Any, path: Path, dtype: torch.dtype, device: str) -> Encode:
    """Pillow, the family's Pillow-backed processor, and its ``get_image_features``."""
    settings = _settings(path)
    named = str(settings.get("image_processor_type", "Qwen2VLImageProcessor")).removesuffix("Fast")
    processor: Any = getattr(transformers, named.removesuffix("Pil") + "Pil")(**settings)

    def encode(file: Path) -> torch.Tensor:
        inputs = processor(images=[Image.open(io.BytesIO(file.read_bytes())).convert("RGB")], return_tensors="pt")
        placed = {
            name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
        }
        if not hasattr(model, "get_image_features"):
            rows: torch.Tensor = model(**placed).last_hidden_state
            return rows
        return _rows(model.get_image_features(**placed))

    return encode


def video_loop(model: Any, path: Path, dtype: torch.dtype, device: str) -> Encode:
    """``load_video`` with PyAV, the Pillow-backed image processor on each frame, and ``get_video_features``.

    The family's own video processor needs torchvision, which this installation has not.
    """
    from transformers import video_utils

    load_video: Any = video_utils.load_video  # its types leave out what its text says: a path
    settings = {name: value for name, value in _settings(path).items() if not name.endswith(("pixels", "size_type"))}

    def encode(file: Path) -> torch.Tensor:
        frames, _ = load_video(str(file), fps=SAMPLED_FPS, backend="pyav")
        side = frames.shape[1] * frames.shape[2]
        processor: Any = Qwen2VLImageProcessorPil(**{**settings, "size": {"shortest_edge": side, "longest_edge": side}})
        inputs = processor(images=list(frames), return_tensors="pt")
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        # Each frame came as a pair of equal ones: one of each two neighbours makes a pair.
        depth, area = processor.temporal_patch_size, processor.patch_size**2
        stills = inputs["pixel_values"].view(len(frames) // depth, depth, rows * columns, 3, depth, area)
        pairs = torch.stack([stills[:, place, :, :, place] for place in range(depth)], dim=3)
        pixels = pairs.reshape(-1, 3 * depth * area).to(device, dtype)
        grid = torch.tensor([[len(frames) // depth, rows, columns]], device=device)
        return _rows(model.get_video_features(pixels, grid))

    return encode


def audio_loop(model: Any, path: Path, dtype: torch.dtype, device: str) -> Encode:
    """``load_audio``, the family's feature extractor, and Whisper's encoder or ``get_audio_features``."""
    from transformers import AutoFeatureExtractor
    from transformers.audio_utils import load_audio

    extractor: Any = AutoFeatureExtractor.from_pretrained(path)

    def encode(file: Path) -> torch.Tensor:
        waveform = load_audio(str(file), sampling_rate=extractor.sampling_rate)
        inputs = extractor(
            waveform, sampling_rate=extractor.sampling_rate, return_attention_mask=True, return_tensors="pt"
        )
        features = inputs["input_features"].to(device, dtype)
        if hasattr(model, "get_audio_features"):
            if "thinker" in type(model).__name__.lower():
                return _rows(model.get_audio_features(features, inputs["attention_mask"].to(device)))
            return _rows(model.get_audio_features(features))
        if hasattr(model, "get_encoder"):
            rows: torch.Tensor = model.get_encoder()(features).last_hidden_state
            return rows
        raise SystemExit(f"transformers has no call that encodes the sound of {type(model).__name__} alone")

    return encode


def _settings(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((path / "preprocessor_config.json").read_text())
    return settings


def _rows(found: Any) -> torch.Tensor:
    """Rows of ``get_…_features``: one tensor, or one for each item."""
    pooled = getattr(found, "pooler_output", found)
    rows: torch.Tensor = pooled if isinstance(pooled, torch.Tensor) else pooled[0]
    return rows


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
