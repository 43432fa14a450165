"""What the whole model says: transformers alone, from the image file to the tokens. The reference of the demo.

It takes no part of this project, not even its preprocessing: the image goes through transformers' PIL processor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

IMAGE_TOKEN = "<|image_pad|>"  # noqa: S105 # it is no secret


def main() -> None:
    """Generates greedily, and prints one JSON object: ``token_ids``, ``text``, ``first_logits``, ``parameters``."""
    parser = argparse.ArgumentParser(description="Asks the whole model about an image.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--text", required=True, help="what is asked")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("file", type=Path, help="an image file")
    arguments = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.float32).eval()
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(arguments.model)
    pixels = processor(images=[Image.open(arguments.file).convert("RGB")], return_tensors="pt")
    rows = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": arguments.text}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    input_ids = tokenizer(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * rows), return_tensors="pt")["input_ids"]
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    with torch.inference_mode():
        answer = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=(input_ids == image_token).long(),
            **pixels,
            do_sample=False,
            max_new_tokens=arguments.max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    token_ids = answer.sequences[0, input_ids.shape[1] :].tolist()
    print(json.dumps({
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "first_logits": answer.logits[0][0].float().tolist(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
