"""What ``ec_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from encoder_client.client_settings import ClientSettings
from encoder_client.credentials import Credentials
from encoder_client.errors import EncoderClientError
from encoder_client.transports import TRANSPORTS


@dataclass(frozen=True)
class ConnectorSettings:
    """How the connector reaches its encoders, and what it may hold."""

    encoders: tuple[str, ...]
    """gRPC targets, as for :class:`~encoder_client.fleet.encoder_fleet.EncoderFleet`. A list, or a text with commas."""
    transports: tuple[str, ...] = TRANSPORTS
    """The preferred first. A list, or a text with commas."""
    mooncake_host: str = ""
    """The address of this host that encoders reach. Empty: found out."""
    mooncake_devices: str = ""
    """RDMA devices of this host, with commas between them. Empty: all."""
    pool_bytes: int = 1 << 30
    """Memory of the host that embeddings are read into. Pages are taken when they are first written."""
    timeout_seconds: float = 60.0
    """How long a request waits for its embeddings once they were asked for; then it fails."""
    tls_ca: str = ""
    """PEM file of the authority that encoders' certificates come from; calls go by TLS. Empty: plain text."""
    client_certificate: str = ""
    """PEM file, for encoders that demand one. Empty: none."""
    client_key: str = ""
    """PEM file of its private key."""
    token_file: str = ""
    """Holds the token to call encoders with. Empty: none."""
    token_in_plain_text: bool = False
    """Let the token go to other hosts without TLS."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ConnectorSettings:
        """Reads the extra configuration.

        Raises:
            EncoderClientError: a setting is unknown, missing, or no value for it.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(config) - known):
            raise EncoderClientError(
                f"ec_connector_extra_config has {', '.join(unknown)}, and may have {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = dict(config)
        for name in ("encoders", "transports"):
            if name in values:
                values[name] = _names(values[name])
        if not values.get("encoders"):
            raise EncoderClientError(
                'ec_connector_extra_config needs the gRPC targets of the encoders: {"encoders": ["encoder-0:50051"]}'
            )
        settings = cls(**values)
        for name, least in (("pool_bytes", 1 << 20), ("timeout_seconds", 0.001)):
            value = getattr(settings, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise EncoderClientError(f"ec_connector_extra_config: {name} must be {least} or more, not {value!r}")
        return settings

    def client_settings(self) -> ClientSettings:
        """How encoders are reached.

        Raises:
            EncoderClientError: a file cannot be read, or a setting is no value for it.
        """
        files = (self.tls_ca, self.client_certificate, self.client_key, self.token_file)
        authority, certificate, key, token = (Path(file) if file else None for file in files)
        credentials = Credentials.from_files(
            authority=authority,
            certificate=certificate,
            key=key,
            token=token,
            token_in_plain_text=self.token_in_plain_text,
        )
        try:
            return ClientSettings(
                credentials,
                transports=self.transports,
                mooncake_host=self.mooncake_host,
                mooncake_devices=self.mooncake_devices,
                read_timeout=self.timeout_seconds,
            )
        except ValueError as error:
            raise EncoderClientError(f"ec_connector_extra_config: {error}") from None


def _names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise EncoderClientError(f"ec_connector_extra_config: {value!r} is no list of names")
    return tuple(str(name).strip() for name in names if str(name).strip())
