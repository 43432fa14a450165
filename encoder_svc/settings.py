"""The settings of a server: one frozen object, made once, handed to whoever needs it.

A value comes from the command line, else from the environment (``ENCODER_SVC_`` and the name in capitals), else from a
TOML file (the name as a key), else from the default here. The field's description is its ``--help``.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from encoder_svc.errors import SetupError
from epd.addresses import is_loopback, split_address
from epd.listening import Listening

ENVIRONMENT_PREFIX = "ENCODER_SVC_"

Group = Literal["Model", "Listening", "Resources", "Limits", "Fetching", "Leases", "Transports", "Operation"]


def _field(group: Group, default: Any, description: str, **bounds: Any) -> Any:
    return Field(default=default, description=description, json_schema_extra={"group": group}, **bounds)


Positive = Annotated[int, Field(ge=1)]
# 10 years stand for "never": infinity has no place in a Duration, nor in a timer.
Seconds = Annotated[float, Field(gt=0, le=315_360_000)]


def _split(value: Any) -> Any:
    """A list may be written as text with commas, since the command line and the environment have no lists."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_split)]
Ports = Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], BeforeValidator(_split)]


class Settings(BaseModel):
    """Everything that can be set. Frozen and validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: Path = _field("Model", ..., "folder of the checkpoint: config.json and safetensors, as on the hub")
    device: str = _field("Model", "auto", "auto (cuda where there is one), cpu, cuda, or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _field(
        "Model",
        "auto",
        "type of weights and embeddings; auto takes the checkpoint's, and float32 on a CPU without fast bfloat16",
    )
    model_options: Names = _field(
        "Model",
        "",
        "what no checkpoint of the family tells, as name=value with commas between them; `encoder-svc models` has the "
        "names",
    )

    listen: str = _field("Listening", "127.0.0.1:50051", "HOST:PORT of gRPC; port 0 takes a free one")
    advertise: str = _field(
        "Listening", "", "HOST:PORT that clients reach this server by; empty takes what it listens on"
    )
    allow_insecure: bool = _field("Listening", False, "serve other hosts without TLS")
    tls_certificate: Path | None = _field("Listening", None, "PEM file with the server's certificate chain")
    tls_key: Path | None = _field("Listening", None, "PEM file with the server's private key")
    tls_client_ca: Path | None = _field(
        "Listening", None, "PEM file with the authority that client certificates must come from"
    )
    callers: Path | None = _field(
        "Listening", None, "TOML file of who may call, and what; without it everybody who can connect may do everything"
    )
    reflection: bool = _field("Listening", True, "answer gRPC reflection, so that grpcurl needs no .proto files")
    channelz: bool = _field("Listening", False, "answer gRPC channelz, for looking into connections")
    metrics_listen: str = _field("Listening", "", "HOST:PORT of Prometheus metrics; empty serves none")

    engines: Positive = _field("Resources", 1, "engines on the one device of --device, each a process with an arena")
    devices: str = _field("Resources", "", "devices with commas between them, one engine each; instead of --device")
    media_workers: Positive = _field("Resources", 1, "processes that decode and preprocess")
    media_memory_bytes: ByteSize = _field(
        "Resources", "4GiB", "memory that a media worker may allocate; an item that takes more fails", ge=512 << 20
    )
    media_threads: Positive = _field("Resources", 1, "threads of one item's preprocessing")
    engine_threads: int = _field("Resources", 0, "threads of a forward on a CPU; 0 takes one for each core", ge=0)
    arena_bytes: ByteSize = _field("Resources", "1GiB", "memory that holds embeddings, per engine", ge=1 << 20)
    input_arena_bytes: ByteSize = _field(
        "Resources", "512MiB", "memory that holds prepared items before their forward", ge=1 << 20
    )
    batch_patches: int = _field(
        "Resources", 0, "patches of a batch at most; 0 takes 2048 on a CPU, and measures a GPU", ge=0
    )
    batch_frames: int = _field(
        "Resources",
        0,
        "mel frames of a batch at most; 0 takes 6000 on a CPU, 48000 on a GPU",
        ge=0,
    )
    batch_window_seconds: float = _field(
        "Resources", 0.0, "time that an item waits for company while its engine is idle", ge=0, le=1
    )
    batches_ahead: Positive = _field(
        "Resources", 2, "batches that an engine holds: one that runs and those queued behind it"
    )
    prompt_arena_share: float = _field("Resources", 0.5, "share of an arena that one prompt may take", gt=0, le=1)

    max_queued_patches: Positive = _field(
        "Limits",
        1_000_000,
        "patches of all parts that have not ended; a mel frame counts as so many as fill the same share of a batch",
    )
    max_upload_bytes: ByteSize = _field("Limits", "64MiB", "size of one uploaded file", ge=1)
    max_uploads_bytes: ByteSize = _field("Limits", "256MiB", "size of all uploaded files that are held", ge=1)
    upload_seconds: Seconds = _field("Limits", 120.0, "time that an uploaded file is kept")
    max_inline_bytes: ByteSize = _field("Limits", "8MiB", "size of one media file inside a request", ge=1)
    max_message_bytes: ByteSize = _field("Limits", "64MiB", "size of one gRPC message", ge=1 << 16)
    max_items: Positive = _field("Limits", 128, "items of one request")
    max_parts: Positive = _field("Limits", 1024, "parts of one prompt")
    max_receivers: Positive = _field("Limits", 16, "receivers of one request")
    max_known_receivers: Positive = _field(
        "Limits", 1024, "named receivers, of all callers, that have parts to read or a subscription"
    )
    max_receiver_parts: Positive = _field("Limits", 4096, "parts addressed to one receiver that it has not released")
    max_image_pixels: Positive = _field("Limits", 64_000_000, "pixels of a decoded image")
    max_video_pixels: Positive = _field("Limits", 9_000_000, "pixels of one frame of a video")
    max_video_frames: Positive = _field("Limits", 108_000, "frames of a video file, looked at or not")
    max_video_seconds: Seconds = _field("Limits", 3600.0, "length of a video")
    max_audio_seconds: Seconds = _field("Limits", 3600.0, "length of a sound track")
    max_queued_parts: Positive = _field("Limits", 1024, "parts of all requests that have not ended")
    max_queued_bytes: ByteSize = _field(
        "Limits", "512MiB", "media bytes of all requests that wait to be prepared", ge=1 << 20
    )
    prepare_seconds: Seconds = _field("Limits", 30.0, "time in which one item must be decoded")
    forward_seconds: Seconds = _field("Limits", 120.0, "time in which one forward must end; then its engine is killed")
    space_seconds: Seconds = _field("Limits", 30.0, "time that a part waits for space before it fails")

    fetch_schemes: Names = _field(
        "Fetching",
        "data",
        "kinds of addresses that are fetched, with commas between them: data, https, http, file",
    )
    fetch_hosts: Names = _field(
        "Fetching", "", "hosts to fetch from, as example.com or *.example.com; empty takes any that is public"
    )
    fetch_ports: Ports = _field("Fetching", "443,80", "ports to fetch from")
    fetch_private_networks: Names = _field(
        "Fetching", "", "networks to fetch from that are not public, such as 10.20.0.0/16; empty takes none"
    )
    fetch_roots: Paths = _field("Fetching", "", "folders below which file: addresses may lie")
    fetch_max_bytes: ByteSize = _field("Fetching", "64MiB", "size of one fetched file", ge=1)
    fetch_seconds: Seconds = _field(
        "Fetching", 20.0, "time in which one file must be fetched, its wait for a place with it"
    )
    fetch_concurrency: Positive = _field("Fetching", 32, "files that are fetched at once")

    lease_seconds: Seconds = _field("Leases", 60.0, "life of a lease when the caller names none")
    max_lease_seconds: Seconds = _field("Leases", 600.0, "longest life of a lease")

    shared_memory: bool = _field("Transports", True, "let processes of this host and user read the arena in place")
    shared_memory_folder: Path | None = _field(
        "Transports", None, "folder for the sockets that hand out arenas; the one of temporary files if none is given"
    )
    mooncake: Literal["auto", "on", "off"] = _field(
        "Transports",
        "auto",
        "serve embeddings by Mooncake; auto does where it loads and the server listens on loopback "
        "only, since Mooncake lets any peer that reaches its port read and write the arena",
    )
    mooncake_host: str = _field(
        "Transports", "", "address that peers reach this host by; empty takes the advertised one"
    )
    mooncake_protocol: Literal["tcp", "rdma"] = _field("Transports", "tcp", "how Mooncake moves bytes")
    mooncake_devices: str = _field("Transports", "", "RDMA devices, with commas between them; empty takes all")
    zeromq: Literal["auto", "on", "off"] = _field(
        "Transports", "auto", "serve embeddings by ZeroMQ; auto does where the server listens on loopback only"
    )
    zeromq_listen: str = _field(
        "Transports",
        "",
        "HOST:PORT of the first engine's ZeroMQ socket; the next engine takes the next port; port 0 takes free ones; "
        "empty takes the host of --listen and free ports",
    )
    zeromq_host: str = _field("Transports", "", "address that peers reach this host by; empty takes the advertised one")
    zeromq_curve_key: Path | None = _field(
        "Transports", None, "file with a CURVE key pair (encoder.key_secret): ZeroMQ then encrypts what travels"
    )

    start_seconds: Seconds = _field("Operation", 600.0, "time in which an engine must be ready")
    restart_seconds: Seconds = _field(
        "Operation", 0.5, "pause before a dead process is started again; doubles up to 30 s while it keeps dying"
    )
    canary_seconds: Seconds = _field(
        "Operation", 30.0, "an engine that encoded nothing for so long is tried with a canary"
    )
    drain_seconds: Seconds = _field("Operation", 10.0, "time that admitted work has to end after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = _field("Operation", "info", "least severity of log lines")

    @field_validator("listen", "advertise", "metrics_listen", "zeromq_listen")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        if value:
            split_address(value)
        return value

    @field_validator("model_options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            name, _, chosen = option.partition("=")
            if not name or not chosen:
                raise ValueError(f"{option!r} is not name=value")
        return value

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if value != "auto" and not _names_device(value):
            raise ValueError("not a device; use auto, cpu, cuda or cuda:N")
        return value

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        if value and not all(_names_device(name.strip()) for name in value.split(",")):
            raise ValueError("not devices with commas between them; use cpu, cuda or cuda:N for each")
        return value

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if self.devices and (self.device != "auto" or self.engines != 1):
            raise ValueError("devices names one device for each engine; leave device and engines out with it")
        listening = self.listening
        zeromq_listen = self.zeromq_listen or listening.address
        if self.zeromq == "on" and not (
            is_loopback(split_address(zeromq_listen)[0]) or self.zeromq_curve_key or self.allow_insecure
        ):
            raise ValueError(
                f"ZeroMQ on {zeromq_listen} would serve other hosts unencrypted; give --zeromq-curve-key, or "
                "--allow-insecure if the network is trusted, or --zeromq-listen 127.0.0.1:0"
            )
        if self.max_lease_seconds < self.lease_seconds:
            raise ValueError("max_lease_seconds is less than lease_seconds")
        if self.max_inline_bytes >= self.max_message_bytes:
            raise ValueError("max_inline_bytes must be less than max_message_bytes")
        return self

    @property
    def options(self) -> dict[str, str]:
        """``model_options``, by name."""
        pairs = (option.partition("=") for option in self.model_options)
        return {name: value for name, _, value in pairs}

    @property
    def listening(self) -> Listening:
        """Where gRPC listens, and its TLS.

        Raises:
            ValueError: they do not go together, which is found when the settings are made.
        """
        return Listening(
            self.listen, self.tls_certificate, self.tls_key, self.tls_client_ca, allow_insecure=self.allow_insecure
        )


def _names_device(name: str) -> bool:
    kind, _, index = name.partition(":")
    return name in ("cpu", "cuda") or (kind == "cuda" and index.isdecimal())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each setting, and ``--config``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings, one key each")
    groups: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        group = groups.setdefault(str(extra["group"]), parser.add_argument_group(str(extra["group"])))
        option = "--" + name.replace("_", "-")
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(
                option,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=f"{text} (default: {'yes' if field.default else 'no'})",
            )
            continue
        shown = (
            "required"
            if field.is_required()
            else f"default: {field.default}"
            if field.default not in ("", None)
            else ""
        )
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        group.add_argument(
            option,
            default=None,
            metavar="{" + ",".join(choices) + "}" if choices else _metavar(field.annotation),
            help=f"{text} ({shown})" if shown else text,
        )


def _metavar(annotation: Any) -> str:
    if isinstance(annotation, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return {Path: "PATH", int: "N", float: "X", ByteSize: "BYTES"}.get(annotation, "TEXT")


def load_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """Merges command line, environment and file.

    Raises:
        SetupError: a value is wrong, or a name is not a setting; the message says where it came from.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file: Path | None = arguments.config
    if file is not None:
        try:
            table = tomllib.loads(file.read_bytes().decode())
        except OSError as error:
            raise SetupError(f"cannot read the settings file {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SetupError(f"the settings file {file} is not TOML: {error}") from None
        for name, value in table.items():
            values[name], origins[name] = value, f"{name} in {file}"
    for name in Settings.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            values[name], origins[name] = environment[variable], variable
        given = getattr(arguments, name, None)
        if given is not None:
            values[name], origins[name] = given, "--" + name.replace("_", "-")
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SetupError("\n".join(_describe(origins, fault) for fault in error.errors())) from None


def _describe(origins: Mapping[str, str], fault: Any) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else ""
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "missing":
        option = name.replace("_", "-")
        return f"--{option} is required (or {ENVIRONMENT_PREFIX}{name.upper()}, or {name} in the settings file)"
    if fault["type"] == "extra_forbidden":
        return f"{origins[name]} is not a setting; `encoder-svc serve --help` lists them"
    return f"{origins.get(name, name)}: {message}" if name else message
