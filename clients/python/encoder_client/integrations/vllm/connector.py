"""The encoder-cache connector that vLLM loads, in its scheduler and in each of its workers.

::

    vllm serve MODEL --limit-mm-per-prompt '{"image": 0, "video": 0}' --ec-transfer-config '{
      "ec_role": "ec_consumer",
      "ec_connector": "EncoderServiceConnector",
      "ec_connector_module_path": "encoder_client.integrations.vllm.connector",
      "ec_connector_extra_config": {"encoders": ["encoder-0:50051"]}}'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from encoder_client.errors import EncoderClientError
from encoder_client.integrations.vllm.plugin import MODELS
from encoder_client.integrations.vllm.scheduler_side import Feature, Load, SchedulerSide
from encoder_client.integrations.vllm.settings import ConnectorSettings
from encoder_client.integrations.vllm.worker_side import load
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.threads.sync_client import SyncEncoderClient

try:
    import vllm
    from vllm.distributed.ec_transfer.ec_connector.base import (
        ECConnectorBase,
        ECConnectorMetadata,
        ECConnectorRole,
        ECConnectorWorkerMetadata,
    )
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
except ImportError as error:
    raise EncoderClientError(
        f"this connector is made for vLLM 0.31 and 0.32, and here is none with encoder-cache connectors ({error})"
    ) from error

if TYPE_CHECKING:
    import torch

SUPPORTED = ((0, 31), (0, 32))
"""The minor versions with the interface that this was written for; it was tested with these."""
MAX_HOLDS = 4096
"""Embeddings that the workers may have open at once: they copy one after another, so it is far from reached."""

if tuple(vllm.__version_tuple__[:2]) not in SUPPORTED:
    versions = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    raise EncoderClientError(
        f"this connector is made for vLLM {versions}, and this is {vllm.__version__}; install one of these, or another "
        "encoder-client"
    )


@dataclass
class StepLoads(ECConnectorMetadata):  # type: ignore[misc] # vLLM is not installed where types are checked
    """What the scheduler tells the workers with a step."""

    step: int = 0
    loads: Sequence[Load] = field(default_factory=list)


@dataclass
class StepLoaded(ECConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """What a worker tells the scheduler after a step."""

    step: int

    def aggregate(self, other: ECConnectorWorkerMetadata) -> StepLoaded:
        """What is true of both workers."""
        return StepLoaded(min(self.step, other.step))


class EncoderServiceConnector(ECConnectorBase):  # type: ignore[misc] # as above
    """Embeddings from encoder-svc in the place of vLLM's own towers.

    Args:
        vllm_config: vLLM's.
        role: scheduler or worker.

    Raises:
        EncoderClientError: it cannot serve as vLLM is set up.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        _check(vllm_config)
        self._model = vllm_config.model_config
        self._client: SyncEncoderClient | None = None
        self._side: SchedulerSide | None = None
        self._loaded: StepLoaded | None = None
        settings = ConnectorSettings.from_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if role is ECConnectorRole.SCHEDULER:
            self._client = _client(settings)
            self._side = SchedulerSide(
                self._client,
                settings.pool_bytes,
                _width(self._model),
                MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False).get_encoder_budget(),
                settings.timeout_seconds,
            )

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._side is not None, "a worker was asked what only the scheduler knows"
        return self._side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled; see :meth:`SchedulerSide.available`."""
        return self._scheduler.available(
            request.request_id, lambda: _features(request), request.ec_transfer_params, num_computed_tokens
        )

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the workers can be told to load it."""
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Room for a media item is taken in vLLM's cache."""
        self._scheduler.allocated(request.mm_features[index].identifier)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """The tokens of a media item are computed."""
        self._scheduler.freed(request.request_id, index)

    def take_unavailable_requests(self) -> set[str]:
        """The requests to fail."""
        return self._scheduler.take_failed()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended, however. Nothing of vLLM's must be kept for it."""
        self._scheduler.finished(request.request_id)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """What the workers load before the step."""
        return StepLoads(*self._scheduler.step())

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have loaded."""
        if isinstance(loaded := connector_output.ec_connector_worker_meta, StepLoaded):
            self._scheduler.loaded(loaded.step)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copies the step's embeddings to the model's device."""
        told = self._get_connector_metadata()
        assert isinstance(told, StepLoads)
        if told.loads:
            load(told.loads, encoder_cache, _device(), self._model.dtype)
            self._loaded = StepLoaded(told.step)

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """Tells the scheduler what this worker has loaded."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Nothing is encoded here."""

    def shutdown(self) -> None:
        """Gives leases back and ends the client's thread."""
        if self._client is not None:
            self._client.close()


def _check(config: Any) -> None:
    transfer = config.ec_transfer_config
    if transfer.ec_role != "ec_consumer":
        raise EncoderClientError(f'ec_role must be "ec_consumer", and is {transfer.ec_role!r}: encoders are elsewhere')
    if config.parallel_config.nnodes > 1:
        raise EncoderClientError(
            "the workers map the scheduler's memory, so they must be on its host; run one engine a host (nnodes=1)"
        )
    _check_deepstack(config.model_config)
    if config.model_config.is_encoder_decoder:
        raise EncoderClientError("vLLM asks connectors for no embeddings of models with cross attention")


def _check_deepstack(model: Any) -> None:
    limit = model.get_multimodal_config().get_limit_per_prompt
    has_tower = any(limit(modality) > 0 for modality in ("image", "video"))
    without_tower = not MODELS.keys().isdisjoint(model.architectures)
    if _levels(model) and not has_tower and not without_tower:
        raise EncoderClientError(
            "vLLM runs no deepstack in a model whose tower it has not loaded; take one of the architectures "
            f"{', '.join(MODELS)} by --hf-overrides, or leave out --limit-mm-per-prompt so that the tower is loaded"
        )


def _client(settings: ConnectorSettings) -> SyncEncoderClient:
    pool = EmbeddingPool(settings.pool_bytes)
    return SyncEncoderClient(settings.encoders, settings.client_settings(), pool=pool, max_holds=MAX_HOLDS)


def _features(request: Any) -> list[Feature]:
    return [
        Feature(
            feature.identifier,
            feature.modality,
            feature.mm_position.get_num_embeds(),
            feature.mm_position.offset + feature.mm_position.length,
        )
        for feature in request.mm_features
    ]


def _width(model: Any) -> int:
    """Of a row: deepstack levels stand beside it."""
    return int(model.get_inputs_embeds_size()) * (1 + _levels(model))


def _levels(model: Any) -> int:
    config = getattr(model.hf_config, "thinker_config", model.hf_config)
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def _device() -> torch.device:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, current_platform.current_device())
    return torch.device(current_platform.device_type)
