"""A tokenizer of single bytes with the special tokens of a family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from encoder_svc.checkpoints.recipe import Chat, Vocabulary


def write_tokenizer(directory: Path, vocabulary: Vocabulary, max_length: int) -> None:
    """Writes the files of the tokenizer and the chat template. Ids of bytes come first, from 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in vocabulary.special])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))
    config: dict[str, Any] = {
        "tokenizer_class": vocabulary.tokenizer,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": vocabulary.begin,
        "eos_token": vocabulary.end,
        "pad_token": vocabulary.pad,
        "unk_token": None,
        "errors": "replace",
        "model_max_length": max_length,
        "split_special_tokens": False,
    }
    if vocabulary.processor is not None:
        config["processor_class"] = vocabulary.processor
    if vocabulary.named:
        config["extra_special_tokens"] = dict(vocabulary.named)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if vocabulary.chat is not None:
        (directory / "chat_template.jinja").write_text(_chat_template(vocabulary.chat))


def _chat_template(chat: Chat) -> str:
    roles = {"system": chat.system, "user": chat.user, "assistant": chat.assistant}
    lines = [
        f"{{%- set starts = {json.dumps({role: start for role, (start, _) in roles.items()})} -%}}",
        f"{{%- set ends = {json.dumps({role: end for role, (_, end) in roles.items()})} -%}}",
        f"{{%- set media = {json.dumps(dict(chat.media))} -%}}",
    ]
    if chat.begin:
        lines.append(f"{{{{- {json.dumps(chat.begin)} -}}}}")
    if chat.default_system:
        message = chat.system[0] + chat.default_system + chat.system[1]
        lines.append(f"{{%- if messages[0].role != 'system' -%}}{{{{- {json.dumps(message)} -}}}}{{%- endif -%}}")
    return "\n".join([*lines, _MESSAGES])


_MESSAGES = """\
{%- for message in messages -%}
  {{- starts[message.role] -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- set kind = part.type | replace('_url', '') -%}
      {%- if kind in media -%}
        {{- media[kind] -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- ends[message.role] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- starts.assistant -}}
{%- endif -%}
"""
