"""What is needed to write a random checkpoint of a family whose model transformers knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from encoder_svc.checkpoints.sizes import Sizes

Json = dict[str, Any]

BYTES = 256
"""Ids below stand for single bytes; special tokens follow."""
MAX_POSITIONS = 32768


@dataclass(frozen=True)
class Chat:
    """The strings of a chat template."""

    system: tuple[str, str]
    """Before and after a message of the system."""
    user: tuple[str, str]
    """Before and after a message of the user."""
    assistant: tuple[str, str]
    """Before and after an answer."""
    media: Mapping[str, str]
    """What shows an item, by the ``type`` of the content's entry: ``image``, ``video``, ``audio``."""
    begin: str = ""
    """Before the first message."""
    default_system: str = ""
    """The message of the system where there is none. Empty: none is added."""


def chat_ml(media: Mapping[str, str], default_system: str = "", begin: str = "") -> Chat:
    """The format of the Qwen families and of many others."""
    system, user, assistant = ((f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant"))
    return Chat(system, user, assistant, media, begin, default_system)


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens of a family, and the names under which its config knows them."""

    special: tuple[str, ...]
    """In the order of their ids, from :data:`BYTES` on."""
    end: str
    """Ends an answer."""
    pad: str
    """Fills up."""
    begin: str | None = None
    """Begins a text."""
    chat: Chat | None = None
    """The chat template; None: the family does not chat."""
    processor: str | None = None
    """The class of the processor."""
    tokenizer: str = "PreTrainedTokenizerFast"
    """The class of the tokenizer."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens that the processor looks for by a name: ``image_token`` → ``<image>``."""

    @property
    def ids(self) -> dict[str, int]:
        """The id of every special token."""
        return {token: BYTES + number for number, token in enumerate(self.special)}

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return BYTES + len(self.special)


@dataclass(frozen=True)
class Recipe:
    """One family."""

    vocabulary: Vocabulary | None
    """None: the family has no text."""
    config: Callable[[Sizes, Any], Json]
    """Makes ``config.json`` as on the hub, without ``vocab_size`` where it is the tokenizer's."""
    files: Mapping[str, Json]
    """The other files: name → content."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """What ``generation_config.json`` holds beside the special tokens."""
    shards: int = 2
    """Files of weights; 1: ``model.safetensors``, without an index."""
    prefix: str = ""
    """What the hub puts before the names that transformers gives."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that differ on the hub from those which transformers saves."""
    zero_centred: tuple[str, ...] = ()
    """Parts of the names of norms whose scale is 1 + weight."""
    tied: bool = False
    """The head of the language model is its table of embeddings."""
    scaled_embeddings: bool = False
    """The language model multiplies its embeddings with the root of its width."""
    add: Callable[[Sizes], Mapping[str, tuple[int, ...]]] | None = None
    """Shapes of tensors that transformers does not know, by name."""
    architecture: str | None = None
    """The class of transformers that knows the other tensors, if it is not that which the config names."""
    architecture_config: str | None = None
    """The part of the config that belongs to it."""
