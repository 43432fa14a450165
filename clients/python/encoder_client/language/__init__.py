"""The language half of a multimodal checkpoint, fed with an encoder's embeddings. Needs the extra ``language``."""

from __future__ import annotations

from encoder_client.language.families import family_of
from encoder_client.language.family import Family
from encoder_client.language.generation import Generation
from encoder_client.language.model import LanguageOnlyModel
from encoder_client.language.placeholders import ExpandedPrompt, PlaceholderError
from encoder_client.language.weights import CheckpointError, WeightsRead

__all__ = [
    "CheckpointError",
    "ExpandedPrompt",
    "Family",
    "Generation",
    "LanguageOnlyModel",
    "PlaceholderError",
    "WeightsRead",
    "family_of",
]
