"""Writes random checkpoints in the layout of the hub: for tests, demonstrations and benchmarks without a download."""

from __future__ import annotations

from encoder_svc.checkpoints.sizes import PRESET_NAMES, PresetName
from encoder_svc.checkpoints.writer import FAMILY_NAMES, write_checkpoint

__all__ = ["FAMILY_NAMES", "PRESET_NAMES", "PresetName", "write_checkpoint"]
