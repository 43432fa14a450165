"""The embeddings of a prompt, put together from whichever encoders they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from encoder_client import chunk_checks
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError, PromptError
from encoder_client.prompts import prompt_checks, prompt_metadata
from encoder_client.prompts.prompt_checks import VIDEO_AUDIO
from encoder_client.prompts.prompt_metadata import VideoAudio
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import Modality

if TYPE_CHECKING:
    import torch

    from encoder_client.client import EncoderClient


class MultiModalEmbedding:
    """The parts of one prompt, in its order, whatever the order and the encoders they come in.

    A part that comes twice is taken once: what has the same content key is the same embedding, also if two encoders
    differ in its last bits. Anything that does not fit is refused with a :class:`PromptError`, and leaves what is there
    as it was.

    Args:
        prompt_id: the prompt.
        num_parts: how many parts it has.
        expected_fingerprint: 32 bytes: of the receiver's model. Empty: that of the first part.

    Example:
        >>> prompt = MultiModalEmbedding("prompt-7", num_parts=3)
        >>> async with near.encode(images, prompt_id="prompt-7", num_parts=3) as call:
        ...     prompt.add(*await call.embeddings())
        >>> await prompt.read(far, chunk_of_another_encoder)
        >>> rows = prompt.torch(Modality.MODALITY_IMAGE)  # (rows of all images, width)
        >>> grids = prompt.metadata(Modality.MODALITY_IMAGE)["image_grid_thw"]  # (images, 3)
    """

    def __init__(self, prompt_id: str, num_parts: int, *, expected_fingerprint: bytes = b"") -> None:
        if num_parts < 1:
            raise ValueError("a prompt of no parts has no embedding")
        self.prompt_id = prompt_id
        self.num_parts = num_parts
        self._fingerprint = expected_fingerprint
        self._told: dict[int, EmbeddingChunk] = {}
        self._first: dict[Modality, EmbeddingChunk] = {}
        """One of each modality, for all others of the prompt to be compared with."""
        self._parts: dict[int, Embedding] = {}

    @property
    def missing(self) -> list[int]:
        """The parts whose embeddings are not there, in order."""
        return [part for part in range(self.num_parts) if part not in self._parts]

    @property
    def complete(self) -> bool:
        """Every part is there."""
        return len(self._parts) == self.num_parts

    def expect(self, layout: EmbeddingChunk) -> None:
        """Learns a part's LAYOUT, by which the prompt was expanded: its embedding must then be what that said.

        Raises:
            PromptError, ChunkError: it does not fit what is known.
        """
        self._check(layout)
        if layout.part_idx not in self._told:
            self._learn(layout)

    def wants(self, chunk: EmbeddingChunk) -> bool:
        """Whether a READY chunk is of a part that is not there yet.

        Raises:
            PromptError, ChunkError: it does not fit what is known.
        """
        self._check(chunk)
        return chunk.part_idx not in self._parts

    async def read(self, client: EncoderClient, chunk: EmbeddingChunk) -> bool:
        """Reads the embedding of a READY chunk, if it is wanted, and gives its lease back in any case.

        Returns:
            False: the part was there already.

        Raises:
            PromptError: it does not fit what is known.
            ChunkError, ReadError, PoolError: it cannot be read.
        """
        try:
            wanted = self.wants(chunk)
        except EncoderClientError:
            await client.abandon([chunk])
            raise
        if not wanted:
            await client.abandon([chunk])
            return False
        return self.add(await client.read(chunk))

    def add(self, *embeddings: Embedding) -> bool:
        """Takes embeddings in. Those of parts that are there already are released.

        Returns:
            All were new.

        Raises:
            PromptError, ChunkError: one does not fit what is known; those before it were taken.
        """
        all_new = True
        for embedding in embeddings:
            part = embedding.chunk.part_idx
            if self.wants(embedding.chunk):
                self._parts[part] = embedding
                self._learn(embedding.chunk)
            elif self._parts[part] is not embedding:
                embedding.release()
                all_new = False
        return all_new

    def parts(self, modality: Modality | None = None) -> tuple[Embedding, ...]:
        """The embeddings in the order of the prompt, of one modality or of all.

        Raises:
            PromptError: some are missing.
        """
        if missing := self.missing:
            raise PromptError(
                f"parts {missing} of {self.num_parts} are missing; wait for them, or ask for them again under the same "
                "prompt_id"
            )
        ordered = (self._parts[part] for part in range(self.num_parts))
        return tuple(part for part in ordered if modality is None or part.chunk.modality == modality)

    def numpy(self, modality: Modality, name: str = "embedding") -> npt.NDArray[Any]:
        """The rows of all items of a modality, in the order of the prompt.

        Args:
            modality: of which there is at least one item.
            name: the tensor: ``embedding``, ``deepstack_0``, ... or ``video_audio_embedding``, which only videos with
                sound have.

        Returns:
            Shape (rows of all, width). Of one item a view of the pool, without a copy; of more a copy. No rows if no
            video has sound.

        Raises:
            PromptError: parts are missing, or there is no such item.
            KeyError: there is no such tensor.
        """
        holders = self._holders(modality, name)
        arrays = [part.numpy(name) for part in holders]
        if not arrays:
            like = self._some(modality).numpy()
            return np.empty((0, like.shape[1]), like.dtype)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def torch(self, modality: Modality, name: str = "embedding") -> torch.Tensor:
        """As :meth:`numpy`, on the CPU; needs the extra ``torch``."""
        import torch

        holders = self._holders(modality, name)
        tensors = [part.torch(name) for part in holders]
        if not tensors:
            like = self._some(modality).torch()
            return like.new_empty((0, like.shape[1]))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def grids(self, modality: Modality) -> list[tuple[int, ...]]:
        """The grid of each item of a modality, before merging, in patches; its meaning is the family's."""
        return [part.grid for part in self.parts(modality)]

    def metadata(self, modality: Modality) -> dict[str, npt.NDArray[Any]]:
        """What the language side needs beside the rows, such as ``image_grid_thw``, shape (images, 3).

        Returns:
            Under the names of Hugging Face's processors, items first (:func:`prompt_metadata.placeholder_metadata`).

        Raises:
            PromptError: parts are missing, or have other names than each other.
        """
        return prompt_metadata.placeholder_metadata([part.chunk for part in self.parts(modality)])

    def video_audio(self) -> VideoAudio | None:
        """How the sound of videos is cut into units; its rows are the tensor ``video_audio_embedding``.

        Returns:
            None: there are no videos, or the family takes no sound with them.

        Raises:
            PromptError: parts are missing, or only some of the videos tell of their sound.
        """
        return prompt_metadata.video_audio([part.chunk for part in self.parts(Modality.MODALITY_VIDEO)])

    def release(self) -> None:
        """Lets go of all parts' memory, which goes back to the pool as soon as no view is alive. Idempotent."""
        for part in self._parts.values():
            part.release()

    def _holders(self, modality: Modality, name: str) -> list[Embedding]:
        self._some(modality)
        parts = self.parts(modality)
        return [part for part in parts if name != VIDEO_AUDIO or name in part.names]

    def _some(self, modality: Modality) -> Embedding:
        parts = self.parts(modality)
        if not parts:
            raise PromptError(f"the prompt has no item of {Modality.Name(modality)}")
        return parts[0]

    def _check(self, chunk: EmbeddingChunk) -> None:
        part = chunk.part_idx
        if chunk.prompt_id != self.prompt_id:
            raise PromptError(f"part {part} is of another prompt: {chunk.prompt_id!r}, not {self.prompt_id!r}")
        if chunk.num_parts != self.num_parts:
            raise PromptError(
                f"part {part} is one of {chunk.num_parts}, and the prompt has {self.num_parts}; say the same num_parts "
                "in all requests of a prompt"
            )
        chunk_checks.check_shape(chunk)
        chunk_checks.check_fingerprint(chunk, self._fingerprint)
        if (known := self._told.get(part)) is not None:
            prompt_checks.check_same_part(chunk, known)
        if chunk.modality == Modality.MODALITY_VIDEO:
            prompt_checks.check_sound(chunk)
        prompt_checks.check_beside(chunk, self._first.values())

    def _learn(self, chunk: EmbeddingChunk) -> None:
        self._told[chunk.part_idx] = chunk
        self._first.setdefault(chunk.modality, chunk)

    def __repr__(self) -> str:
        return f"<MultiModalEmbedding of {self.prompt_id!r}: {len(self._parts)} of {self.num_parts} parts>"
