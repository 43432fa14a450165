"""What a run gives: the schema of its JSON file. docs/performance.md describes it.

Figures stand at the top level under their own names. Times are in milliseconds where the name says ``_ms``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from encoder_svc.errors import SetupError

SCHEMA_VERSION: Literal[1] = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(_Model):
    """Where it was measured."""

    cpu: str
    cores: int
    """That this process may use."""
    instruction_sets: list[str]
    memory_bytes: int
    kernel: str
    python: str
    torch_threads: int
    """Of a forward, in the server and in the plain loop."""
    versions: dict[str, str]
    load_average_at_start: float
    """Of one minute. A quiet machine shows less than 0.5."""


class FloorCheck(_Model):
    """A bound that a figure must keep, and whether it does."""

    figure: str
    """Its name in this file; a dot leads into an object."""
    relation: Literal["at least", "at most"]
    bound: float
    value: float | None
    """None: it was not measured."""
    met: bool


class Series(_Model):
    """One line, or one set of bars."""

    label: str
    x: list[float | str]
    y: list[float]


class Chart(_Model):
    """What ``--plot`` draws."""

    title: str
    x_label: str
    y_label: str
    kind: Literal["lines", "bars"]
    series: list[Series]
    logarithmic: bool = False
    """The x axis."""
    bound: float | None = None
    """Of y: drawn as a line across."""


class Percentiles(_Model):
    """Nearest-rank percentiles: values that were measured."""

    p50: float
    p99: float


class Result(_Model):
    """What every run tells."""

    schema_version: Literal[1] = SCHEMA_VERSION
    command_line: str
    started_at: str
    """UTC, as ISO 8601 writes it."""
    seconds: float
    """Of the whole run."""
    machine: Machine
    parameters: dict[str, str | int | float | bool]
    """What the figures were measured with, defaults included."""
    floors: list[FloorCheck]
    charts: list[Chart]

    def figures(self) -> dict[str, Any]:
        """The figures of the command, without what every run tells."""
        return self.model_dump(exclude={*Result.model_fields, "command"})


class Round(_Model):
    """One window of the service and one of the reference, one right after the other."""

    images_per_second: float
    reference_images_per_second: float


class Pipeline(_Model):
    """How the stages of the service overlap: the seconds that each worked, in a second of the measurement.

    A service that does one thing after the other stays at 1 in all. Here the forward alone comes near to 1, and all
    else is done beside it.
    """

    prepare: float
    """Decoding and preprocessing, over all media workers."""
    forward: float
    """Over all engines."""
    stage: float
    """Copying rows into slots, with their checksums, over all engines."""
    read: float
    """Reading rows, over all callers."""
    total: float
    """Of these."""


class ThroughputResult(Result):
    """``bench throughput``."""

    command: Literal["throughput"] = "throughput"
    images_per_second: float
    """Through the whole service, from JPEG bytes to rows in the caller's memory."""
    reference_images_per_second: float
    """By the plain loop: transformers' Pillow processor and tower, one image at a time."""
    ratio: float
    mean_batch_items: float
    mean_batch_patches: float
    images: int
    """That were counted."""
    reference_images: int
    pipeline: Pipeline
    rounds: list[Round]


class OverheadResult(Result):
    """``bench overhead``."""

    command: Literal["overhead"] = "overhead"
    requests: int
    """Behind each percentile."""
    end_to_end_ms: Percentiles
    """From the call until the checked bytes are in the caller's memory."""
    prepare_ms: Percentiles
    forward_ms: Percentiles
    stage_ms: Percentiles
    """Copying the rows into the slot, with the checksum. Part of the fixed overhead."""
    fixed_overhead_ms: Percentiles
    """End to end, less preparing and forward."""
    confirmed_overhead_ms: Percentiles
    """The same, until the encoder has confirmed the lease too: when the client hands the rows out."""
    cached_ms: Percentiles | None
    """From the call until the checked bytes are in the caller's memory, for what the encoder holds. None: not all
    requests were answered from the cache."""
    cached_confirmed_ms: Percentiles | None
    cached_requests_per_second: float | None
    """Many at a time, each with its read and its release."""
    cached_share: float
    """Of the requests that should have been answered from the cache, those that were."""


class BatchingSize(_Model):
    """Images of one size."""

    batched_images_per_second: float
    single_images_per_second: float
    """With a budget that lets only one item into a batch; all else is equal."""
    sequential_images_per_second: float
    """One request at a time."""
    gain: float
    """Batched over single."""
    gain_over_sequential: float
    mean_batch_items: float


class BatchingResult(Result):
    """``bench batching``."""

    command: Literal["batching"] = "batching"
    sizes: dict[str, BatchingSize]
    """By the side of the images in pixels."""
    smallest_gain: float


class FairnessResult(Result):
    """``bench fairness``."""

    command: Literal["fairness"] = "fairness"
    beside_prompt_ms: Percentiles
    """Single images, end to end, while a prompt of many images runs."""
    beside_singles_ms: Percentiles
    """Single images while as many other single images run."""
    ratio: float
    """Of the p99."""
    singles_beside_prompt: int
    singles_beside_singles: int
    prompts: int


class Ends(_Model):
    """How requests ended, as the caller saw it. Each is one part."""

    ready: int
    cancelled: int
    failed: int
    left: int
    """The caller went away first, so it saw no end."""


class Leaks(_Model):
    """What the server still held when nothing should be there."""

    requests: int
    parts: int
    leases: int
    leased_bytes: int
    reserved_bytes: int
    media_bytes: int


class SoakResult(Result):
    """``bench soak``."""

    command: Literal["soak"] = "soak"
    requests: int
    requests_per_second: float
    ends: Ends
    requests_without_an_end: int
    from_cache: int
    failed_by_reason: dict[str, int]
    unexpected_failures: int
    """All, but those that a killed engine explains."""
    wrong_ends: int
    """Calls whose parts ended twice, or not at all."""
    leaks: Leaks
    rss_slope_bytes_per_request: dict[str, float | None]
    """Over the second half, by process. None: too few measurements, or the process was killed."""
    kills: int
    slowest_recovery_seconds: float | None
    """From a kill until the engine is ready again. None: nothing was killed."""
    ok: bool
    """No bound was broken."""


class LoopResult(Result):
    """``bench loop``."""

    command: Literal["loop"] = "loop"
    idle_ms: Percentiles
    """``GetServerInfo``, from the moment that it was due, while nothing else happens."""
    beside_forward_ms: Percentiles
    beside_streams_ms: Percentiles
    forward_seconds: float
    """The median of those that ran beside the calls."""
    streams_per_second: float
    calls: int
    """Behind each percentile, at least."""


class TransportFigures(_Model):
    """One transport at one size."""

    transport: str
    nbytes: int
    """Of an embedding."""
    gigabytes_per_second: float
    """From the call until the bytes are in the pool, checked; the median of all reads."""
    raw_gigabytes_per_second: float
    """The median of the raw loop."""
    ratio: float
    checksum: bool
    """It was computed and compared, within the time."""
    milliseconds: float
    """The median of all reads."""
    raw_one_frame_gigabytes_per_second: float | None
    """ZeroMQ only: a raw pair that sends the whole as one frame."""
    ratio_to_one_frame: float | None
    raw_bytes_gigabytes_per_second: float | None = None
    """In band only: a raw stream of bytes in pieces as large, without the messages that they come in."""
    ratio_to_bytes: float | None = None

    @property
    def name(self) -> str:
        """Transport and size, for people: ``mooncake 8 MiB``."""
        return f"{self.transport} {shown_bytes(self.nbytes)}"


class TransportResult(Result):
    """``bench transport``."""

    command: Literal["transport"] = "transport"
    results: list[TransportFigures]

    def figures(self) -> dict[str, Any]:
        """By transport and size: floors name them so."""
        return {
            figures.name: figures.model_dump(exclude={"transport", "nbytes", "checksum"}, exclude_none=True)
            for figures in self.results
        }


AnyResult = Annotated[
    ThroughputResult | OverheadResult | BatchingResult | FairnessResult | SoakResult | LoopResult | TransportResult,
    Field(discriminator="command"),
]
_ANY: TypeAdapter[AnyResult] = TypeAdapter(AnyResult)


def shown_bytes(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / (1 << 20):g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"


def read_result(file: Path) -> AnyResult:
    """Reads a file that ``--json`` wrote.

    Raises:
        SetupError: it cannot be read, or is none.
    """
    try:
        return _ANY.validate_json(file.read_bytes())
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise SetupError(f"{file} is no result of `encoder-svc bench`: {place}: {fault['msg']}") from None
