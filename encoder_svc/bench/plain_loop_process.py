"""The process of the plain loop: transformers alone, one image at a time.

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


def main() -> None:
    """Loads, says so, then answers each command until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("photographs", type=Path, help="folder of JPEG files")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, arguments.dtype)
    model: Any = AutoModel.from_pretrained(arguments.model, dtype=dtype).eval().to(arguments.device)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(arguments.model)
    files = itertools.cycle([path.read_bytes() for path in sorted(arguments.photographs.iterdir())])

    def encode(file: bytes) -> None:
        inputs = processor(images=[Image.open(io.BytesIO(file)).convert("RGB")], return_tensors="pt")
        pixels = inputs["pixel_values"].to(arguments.device, dtype)
        [rows] = model.get_image_features(pixels, inputs["image_grid_thw"].to(arguments.device)).pooler_output
        rows.cpu()

    _answer({"transformers": transformers.__version__})
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            begun = monotonic()
            images = 0
            while images < command["images"] if command["images"] else monotonic() - begun < command["seconds"]:
                encode(next(files))
                images += 1
            _answer({"images": images, "seconds": monotonic() - begun})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
