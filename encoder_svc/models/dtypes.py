"""Which number type a tower runs in. Free of torch, so that the front can decide."""

from __future__ import annotations

from pathlib import Path

from encoder_svc.errors import SetupError
from epd.encoder.v1.embedding_pb2 import DataType

DATA_TYPES: dict[str, DataType] = {
    "float32": DataType.DATA_TYPE_FLOAT32,
    "bfloat16": DataType.DATA_TYPE_BFLOAT16,
    "float16": DataType.DATA_TYPE_FLOAT16,
}
"""The number types of embeddings, by torch's names."""

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_FAST_ON_CPU: dict[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
}
"""Flags of /proc/cpuinfo, one of which a CPU needs to be faster in this type than in float32."""


def resolve_dtype(setting: str, checkpoint_dtype: str, device: str, cpu_flags: frozenset[str] | None = None) -> str:
    """The number type of weights and embeddings.

    Args:
        setting: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        checkpoint_dtype: what the checkpoint's config names; empty or another type counts as float32.
        device: ``cpu``, or what torch calls another device.
        cpu_flags: what the CPU can do; None reads /proc/cpuinfo.

    Returns:
        A name of :data:`DATA_TYPES`.

    Raises:
        SetupError: ``setting`` is none of these.
    """
    if setting != "auto":
        if setting not in DATA_TYPES:
            raise SetupError(f"dtype {setting!r} is unknown; use auto, {', '.join(DATA_TYPES)}")
        return setting
    dtype = checkpoint_dtype if checkpoint_dtype in DATA_TYPES else "float32"
    if device == "cpu" and dtype != "float32":
        flags = read_cpu_flags() if cpu_flags is None else cpu_flags
        if not flags & _FAST_ON_CPU[dtype]:
            return "float32"
    return dtype


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of the first CPU, as Linux names them. Empty where they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
