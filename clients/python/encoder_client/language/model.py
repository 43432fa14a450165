"""A language model without its towers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError
from encoder_client.language.families import Family, family_of
from encoder_client.language.generation import Generation
from encoder_client.language.placeholders import ExpandedPrompt, expand, rows_of
from encoder_client.language.weights import CheckpointError, WeightsRead, read_weights
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

logger = logging.getLogger("encoder_client")

Prompt = str | Sequence[Mapping[str, Any]]
"""Text with one placeholder token for each part, or messages for the checkpoint's chat template."""


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

    def __init__(self, model: Any, tokenizer: Any, family: Family, weights: WeightsRead) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._family = family
        self._lock = Lock()
        self.weights = weights

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
            EncoderClientError: the family is not known here.
        """
        folder = Path(folder)
        try:
            model_type = json.loads((folder / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError):
            raise CheckpointError(f"{folder} holds no config.json with a model_type; give a checkpoint") from None
        family = family_of(model_type)
        state, weights = read_weights(folder, dtype, family.is_tower)
        config = transformers.AutoConfig.from_pretrained(folder)
        base = getattr(transformers, family.model_class)
        model, report = _without_towers(base, family).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if faults := report[kind]:
                shown = ", ".join(str(fault) for fault in sorted(faults)[:3])
                raise CheckpointError(f"{folder} does not fit {family.model_class}: {kind.replace('_', ' ')}: {shown}")
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        logger.info(
            "read %d tensors, %d bytes, from %d files; left %d tensors of the towers out",
            len(weights.tensors), weights.nbytes, len(weights.files), len(weights.left_out),
        )  # fmt: skip
        return cls(model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(folder), family, weights)

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
        towers = [self._model.get_submodule(path) for path in self._family.tower_modules]
        return sum(parameter.numel() for tower in towers for parameter in tower.parameters())

    def expand(self, prompt: Prompt, layouts: Sequence[EmbeddingChunk]) -> ExpandedPrompt:
        """Makes room for the parts' rows. LAYOUT is enough, so this can be done while the encoder works.

        Args:
            prompt: text, or messages whose content holds an entry of type ``image`` for each image.
            layouts: LAYOUT or READY of every part of the prompt.

        Raises:
            PlaceholderError: prompt and parts do not fit together.
        """
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        token_ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return expand(token_ids, layouts, self._family, self._model.config)

    def generate(
        self,
        prompt: ExpandedPrompt,
        embeddings: Sequence[Embedding | torch.Tensor],
        *,
        max_new_tokens: int = 128,
        first_logits: bool = False,
        **options: Any,
    ) -> Generation:
        """Generates an answer.

        Args:
            prompt: from :meth:`expand`.
            embeddings: one for each part, in any order; plain tensors in the order of the parts.
            max_new_tokens: tokens at most.
            first_logits: return the logits of the first token too.
            options: as ``transformers.GenerationMixin.generate`` takes them, such as ``do_sample`` (False here).

        Raises:
            PlaceholderError: rows, width or dtype do not fit the placeholders.
        """
        arguments = self._arguments(prompt, embeddings)
        with self._lock, torch.inference_mode():
            answer = self._model.generate(
                **arguments, **{"do_sample": False, **options}, max_new_tokens=max_new_tokens,
                return_dict_in_generate=True, output_logits=first_logits,
            )  # fmt: skip
        token_ids = answer.sequences[0, prompt.input_ids.shape[1] :].tolist()
        return Generation(
            token_ids=token_ids,
            text=self.decode(token_ids),
            first_logits=answer.logits[0][0].float().cpu() if first_logits else None,
        )

    def stream(
        self,
        prompt: ExpandedPrompt,
        embeddings: Sequence[Embedding | torch.Tensor],
        *,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> Iterator[int]:
        """As :meth:`generate`, token by token. Closing the iterator ends the generation after its current token."""
        arguments = self._arguments(prompt, embeddings)
        tokens = _TokenQueue()
        left = Event()

        def run() -> None:
            try:
                with self._lock, torch.inference_mode():
                    self._model.generate(
                        **arguments, **{"do_sample": False, **options}, max_new_tokens=max_new_tokens,
                        streamer=tokens, stopping_criteria=StoppingCriteriaList([_WhenSet(left)]),
                    )  # fmt: skip
            except BaseException as error:  # it belongs to whoever iterates
                tokens.queue.put(error)
            else:
                tokens.queue.put(None)

        thread = Thread(target=run, name="generation")
        thread.start()
        try:
            while (token := tokens.queue.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            left.set()
            thread.join()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _arguments(self, prompt: ExpandedPrompt, embeddings: Sequence[Embedding | torch.Tensor]) -> dict[str, Any]:
        device = self._model.device
        rows = rows_of(prompt, embeddings, self.hidden_size, self.dtype)
        return {
            "input_ids": prompt.input_ids.to(device),
            "attention_mask": torch.ones_like(prompt.input_ids, device=device),
            "mm_token_type_ids": prompt.mm_token_type_ids.to(device),
            "mm_encoder_outputs": {
                self._family.placeholders[modality].encoder_output: BaseModelOutputWithPooling(
                    pooler_output=tuple(part.to(device) for part in parts)  # type: ignore[arg-type] # its models give one
                )
                for modality, parts in rows.items()
            },
            **{name: value.to(device) for name, value in prompt.values.items()},
        }


def _without_towers(base: type[Any], family: Family) -> type[Any]:
    """A subclass whose towers are empty modules.

    transformers builds a model on the meta device before it fills it, so the towers that the base class makes never
    hold memory; they are gone before parameters are counted, filled or tied.
    """

    class LanguageOnly(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for path in family.tower_modules:
                if any(not parameter.is_meta for parameter in self.get_submodule(path).parameters()):
                    raise EncoderClientError("transformers allocated a tower; this version is not supported")
                self.set_submodule(path, nn.Module())

    # transformers renames a checkpoint's tensors by the class's name, and only for classes of its own modules.
    LanguageOnly.__name__, LanguageOnly.__module__ = base.__name__, base.__module__
    return LanguageOnly


class _TokenQueue(BaseStreamer):
    """Hands tokens on to another thread."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # the first call brings the prompt
            self._prompt = False
            return
        for token in value.flatten().tolist():
            self.queue.put(token)

    def end(self) -> None:
        """The end is told by the thread, which also knows errors."""


class _WhenSet(StoppingCriteria):
    """Stops when an event is set."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)
