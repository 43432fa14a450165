"""From a configuration to an engine that takes batches: device, towers, and a first forward."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from encoder_svc import __version__
from encoder_svc.engine.batch_budget import measure_tower
from encoder_svc.engine.runner import Runner
from encoder_svc.engine.serving import ArenaService
from encoder_svc.engine.staging import make_staging
from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import Adapter, Progress, Tower, WarmUp
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.registry import find_family, open_adapter
from encoder_svc.shared_memory import SharedMemory
from epd.encoder.v1.encoder_service_pb2 import ModelInfo
from epd.internal.v1.engine_pb2 import ConfigureEngine, EngineReady, TowerBudget

log = logging.getLogger(__name__)

_MOONCAKE_DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that takes batches."""

    runner: Runner
    ready: EngineReady
    """What the front is told."""


def load_engine(
    configuration: ConfigureEngine,
    input_arena: SharedMemory,
    arena: SharedMemory,
    boot_id: str,
    service: ArenaService,
    progress: Progress,
) -> LoadedEngine:
    """Loads the towers and runs a warm-up forward, in the thread that will run the batches.

    Args:
        configuration: the model and the device.
        input_arena: where the model's inputs will be.
        arena: where the slots will be.
        boot_id: of this life of the engine.
        service: how the arena is served.
        progress: told how far it is.

    Raises:
        SetupError: the engine cannot start as it is set up.
    """
    device = _open_device(configuration.device)
    if configuration.threads:
        torch.set_num_threads(configuration.threads)
    if find_family(open_checkpoint(Path(configuration.model))).needs_transformers:
        check_transformers()
    adapter = open_adapter(Path(configuration.model), configuration.dtype, configuration.model_options)
    tower = adapter.load_tower(device, progress)
    runner = Runner(tower, device, input_arena, arena, make_staging(device, input_arena, arena))
    progress("warming up", 0.0)
    warm_up = adapter.warm_up()
    _warm_up(warm_up, tower)
    # On a CPU the default fits: two thousand patches fill its cores, and more only make everybody wait.
    measures = device.type == "cuda" and warm_up.tower in configuration.measured_towers
    budgets = []
    if measures:
        cost = measure_tower(tower, warm_up, device)
        log.info("%s gains from batches of up to %d patches or mel frames", device, cost)
        budgets.append(TowerBudget(tower=warm_up.tower, cost=cost))
    versions = _versions()
    ready = EngineReady(
        boot_id=boot_id,
        model=_describe(Path(configuration.model).resolve().name, adapter, tower, versions),
        transports=service.transports,
        locators=service.locators,
        versions=versions,
        budgets=budgets,
    )
    return LoadedEngine(runner, ready)


def cache_namespace(compatibility_fingerprint: bytes, versions: dict[str, str]) -> bytes:
    r"""Names what content keys hold for: SHA-256 over the fingerprint and the code that computes.

    Args:
        compatibility_fingerprint: 32 bytes.
        versions: of everything that decides results, by name.

    Returns:
        32 bytes: SHA-256(fingerprint ‖ "name=version\n" for each name, sorted).
    """
    code = "".join(f"{name}={version}\n" for name, version in sorted(versions.items()))
    return hashlib.sha256(compatibility_fingerprint + code.encode()).digest()


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        found = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise SetupError(f"the device {name!r} cannot be used; this machine has: {found}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def check_transformers() -> None:
    """Imports what builds the towers of most families.

    Raises:
        SetupError: it cannot be imported.
    """
    try:
        import_module("transformers.modeling_utils")
    except Exception as error:  # a torchvision that does not fit raises whatever it likes, anywhere in here
        log.error("transformers cannot be imported", exc_info=error)  # noqa: TRY400 (the next line raises another)
        raise SetupError(
            "transformers cannot be imported; `encoder-svc doctor` tells why and what to do (often it is a torchvision "
            "that does not belong to this torch: `pip uninstall torchvision`)"
        ) from error


@torch.inference_mode()
def _warm_up(warm_up: WarmUp, tower: Tower) -> None:
    (matrices,) = tower.encode([warm_up.item])
    if not all(bool(torch.isfinite(matrix).all()) for matrix in matrices):
        raise SetupError(
            "the model's first output holds NaN or infinity: its weights are damaged, or do not fit the dtype; "
            "try --dtype float32, or download the checkpoint again"
        )


def _describe(name: str, adapter: Adapter, tower: Tower, versions: dict[str, str]) -> ModelInfo:
    deciding = {name: version for name, version in versions.items() if name != "mooncake"}
    return ModelInfo(
        name=name,
        model_type=adapter.model_type,
        modalities=adapter.modalities,
        hidden_size=adapter.hidden_size,
        dtype=adapter.dtype,
        tensors=adapter.tensors,
        compatibility_fingerprint=tower.compatibility_fingerprint,
        cache_namespace=cache_namespace(tower.compatibility_fingerprint, deciding),
        weights=tower.weights,
    )


def _versions() -> dict[str, str]:
    versions = {
        "encoder-svc": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }
    for distribution in _MOONCAKE_DISTRIBUTIONS:
        try:
            versions["mooncake"] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    return versions
