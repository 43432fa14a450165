"""A language model without its towers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from encoder_client.language.family import SOUND_ROWS, Entrance
from encoder_client.language.generation import Generation
from encoder_client.language.loading import Loaded, load
from encoder_client.language.placeholders import ExpandedPrompt, Rows, Vocabulary, expand, rows_of
from encoder_client.language.streaming import stream
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import Modality

Prompt = str | Sequence[Mapping[str, Any]]
"""Text with one placeholder for each part, or messages for the checkpoint's chat template."""

_TOWER_OUTPUT = {Modality.MODALITY_IMAGE: "image", Modality.MODALITY_VIDEO: "video"}
"""Keys of ``mm_encoder_outputs``."""


class LanguageOnlyModel:
    """Everything of a checkpoint but its towers; embeddings come from an encoder.

    The towers' tensors are not read and no memory is allocated for them: :attr:`weights` is the log. One generation
    runs at a time; others wait for it.

    Example:
        >>> model = LanguageOnlyModel.load(Path("Qwen2.5-VL-3B-Instruct"), dtype=torch.bfloat16)
        >>> messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
        >>> prompt = model.expand(messages, [layout])  # as soon as LAYOUT is there
        >>> print(model.generate(prompt, [embedding], max_new_tokens=64).text)
    """

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._family = loaded.family
        self._vocabulary = Vocabulary(loaded.family, loaded.tokenizer, loaded.model.config, loaded.checkpoint)
        self._lock = Lock()
        self.weights = loaded.weights

    @classmethod
    def load(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Self:
        """Loads a checkpoint's language half.

        Args:
            folder: config, tokenizer and safetensors, as on the hub.
            dtype: of weights and embeddings.
            device: where it runs.

        Raises:
            CheckpointError: a file or tensor is missing, or does not fit.
            EncoderClientError: the family is not known here, or has no language side.
        """
        loaded = load(Path(folder), dtype)
        loaded.model.to(device)
        return cls(loaded)

    @property
    def hidden_size(self) -> int:
        """The width of an embedding row."""
        size: int = self._model.get_input_embeddings().embedding_dim
        return size

    @property
    def dtype(self) -> torch.dtype:
        """The type that embeddings must have."""
        dtype: torch.dtype = self._model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def parameters(self) -> int:
        """How many parameters are held."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def tower_parameters(self) -> int:
        """How many of them are a tower's: 0."""
        towers = tuple(f"{path}." for path in self._family.tower_modules)
        named = self._model.named_parameters()
        return sum(parameter.numel() for name, parameter in named if f"{name}.".startswith(towers))

    @property
    def deepstack_levels(self) -> int:
        """How many further tensors each image or video needs beside its rows."""
        if self._family.entrance is not Entrance.TOWER_OUTPUTS:
            return 0
        return len(self._model.config.vision_config.deepstack_visual_indexes)

    def expand(self, prompt: Prompt, layouts: Sequence[EmbeddingChunk]) -> ExpandedPrompt:
        """Makes room for the parts' rows. LAYOUT is enough, so this can be done while the encoder works.

        Args:
            prompt: text, or messages whose content holds an entry of type ``image``, ``video`` or ``audio`` for each
                part. A model that has no placeholders, as Whisper, takes the text that its decoder begins with.
            layouts: LAYOUT or READY of every part of the prompt.

        Raises:
            PlaceholderError: prompt and parts do not fit together.
        """
        if isinstance(prompt, str):
            return expand(prompt, layouts, self._vocabulary)
        text: str = self._tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return expand(text, layouts, self._vocabulary)

    def generate(
        self,
        prompt: ExpandedPrompt,
        embeddings: Sequence[Rows],
        *,
        max_new_tokens: int = 128,
        first_logits: bool = False,
        **options: Any,
    ) -> Generation:
        """Generates an answer.

        Args:
            prompt: from :meth:`expand`.
            embeddings: one for each part, in any order; plain tensors in the order of the parts, of a video with sound
                the rows of its pictures and of its sound.
            max_new_tokens: tokens at most.
            first_logits: return the logits of the first token too.
            options: as ``transformers.GenerationMixin.generate`` takes them, such as ``do_sample`` (False here).

        Raises:
            PlaceholderError: rows, width or dtype do not fit the placeholders.
        """
        run = self._generation(prompt, embeddings, max_new_tokens, options)
        answer = run(return_dict_in_generate=True, output_logits=first_logits)
        token_ids = answer.sequences[0, prompt.input_ids.shape[1] :].tolist()
        return Generation(
            token_ids=token_ids,
            text=self.decode(token_ids),
            first_logits=answer.logits[0][0].float().cpu() if first_logits else None,
        )

    def stream(
        self,
        prompt: ExpandedPrompt,
        embeddings: Sequence[Rows],
        *,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> Iterator[int]:
        """As :meth:`generate`, token by token. Closing the iterator ends the generation after its current token."""
        return stream(self._generation(prompt, embeddings, max_new_tokens, options))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _generation(
        self,
        prompt: ExpandedPrompt,
        embeddings: Sequence[Rows],
        max_new_tokens: int,
        options: Mapping[str, Any],
    ) -> partial[Any]:
        arguments = self._arguments(prompt, embeddings)
        return partial(self._run, **arguments, **{"do_sample": False, **options}, max_new_tokens=max_new_tokens)

    def _run(self, **arguments: Any) -> Any:
        # Some models have a method of their own, which wants media.
        with self._lock, torch.inference_mode():
            return GenerationMixin.generate(self._model, **arguments)

    def _arguments(self, prompt: ExpandedPrompt, embeddings: Sequence[Rows]) -> dict[str, Any]:
        device = self._model.device
        parts = [
            tuple(matrix.to(device) for matrix in matrices)
            for matrices in rows_of(prompt, embeddings, self.hidden_size, self.dtype, self.deepstack_levels)
        ]
        ids = prompt.input_ids.to(device)
        if self._family.entrance is Entrance.CROSS_ATTENTION:
            return {"encoder_outputs": BaseModelOutput(last_hidden_state=parts[0][0][None]), "decoder_input_ids": ids}
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            **{name: value.to(device) for name, value in prompt.values.items()},
        }
        if self._family.sound_argument is not None:
            arguments[self._family.sound_argument] = any(span.tensor == SOUND_ROWS for span in prompt.spans)
        if self._family.type_ids_argument is not None:
            arguments[self._family.type_ids_argument] = prompt.mm_token_type_ids.to(device)
        encoded: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        positions: list[int] = []
        rows: list[torch.Tensor] = []
        for span, matrices in zip(prompt.spans, parts, strict=True):
            if self._family.entrance is not Entrance.EMBEDDINGS and span.modality in _TOWER_OUTPUT:
                encoded.setdefault(_TOWER_OUTPUT[span.modality], []).append(matrices)
            else:
                positions += span.positions
                rows.append(matrices[0])
        if encoded:
            joined = self._family.entrance is Entrance.JOINED_TOWER_OUTPUTS
            arguments["mm_encoder_outputs"] = {kind: _tower_output(items, joined) for kind, items in encoded.items()}
        if rows:
            with torch.inference_mode():
                embedded = self._model.get_input_embeddings()(ids)
                embedded[0, positions] = torch.cat(rows)
            arguments["inputs_embeds"] = embedded
        return arguments


def _tower_output(items: Sequence[tuple[torch.Tensor, ...]], joined: bool) -> BaseModelOutputWithDeepstackFeatures:
    """What a tower returns for some items, each with its rows and deepstack levels."""
    rows, *levels = (tuple(matrices) for matrices in zip(*items, strict=True))
    output: Any = BaseModelOutputWithDeepstackFeatures  # its models give and take tuples, whatever the types say
    pooled = torch.cat(rows) if joined else rows
    return output(pooler_output=pooled, deepstack_features=levels)  # type: ignore[no-any-return]
