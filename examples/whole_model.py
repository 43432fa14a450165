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
    """Generates greedily; for each prompt a JSON line: ``token_ids``, ``text``, ``first_logits``, ``parameters``."""
    parser = argparse.ArgumentParser(description="Asks the whole model about images.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--text", required=True, help="what is asked")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--images", type=int, default=1, help="images of one prompt; the files are so many prompts")
    parser.add_argument("files", type=Path, nargs="+", help="image files")
    arguments = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.float32).eval()
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(arguments.model)
    for first in range(0, len(arguments.files), arguments.images):
        files = arguments.files[first : first + arguments.images]
        print(
            json.dumps(answer(tokenizer, model, processor, arguments.text, files, arguments.max_new_tokens)), flush=True
        )


def answer(
    tokenizer: Any, model: Any, processor: Any, question: str, files: list[Path], max_new_tokens: int
) -> dict[str, Any]:
    """What the model says about some images."""
    pixels = processor(images=[Image.open(file).convert("RGB") for file in files], return_tensors="pt")
    messages = [{"role": "user", "content": [*({"type": "image"} for _ in files), {"type": "text", "text": question}]}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, *after = text.split(IMAGE_TOKEN)
    for grid, rest in zip(pixels["image_grid_thw"], after, strict=True):
        before += IMAGE_TOKEN * (int(grid.prod()) // processor.merge_size**2) + rest
    input_ids = tokenizer(before, return_tensors="pt")["input_ids"]
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    with torch.inference_mode():
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=(input_ids == image_token).long(),
            **pixels,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    token_ids = generated.sequences[0, input_ids.shape[1] :].tolist()
    return {
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "first_logits": generated.logits[0][0].float().tolist(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    main()
