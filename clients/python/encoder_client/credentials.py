"""What a client shows to encoders, and what it asks to see of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from encoder_client.errors import EncoderClientError
from encoder_client.stub import Metadata
from epd.addresses import is_loopback, split_address


@dataclass(frozen=True)
class Credentials:
    """How calls are protected, and who makes them. Without anything: plain text, and nobody in particular.

    Example:
        >>> Credentials.from_files(authority=Path("ca.pem"), token=Path("token"))
        >>> Credentials(grpc.ssl_channel_credentials(), token="...")  # the authorities that gRPC knows
    """

    channel: grpc.ChannelCredentials | None = field(default=None, repr=False)
    """TLS, with or without a certificate of the client's own. None: plain text."""
    token: str = field(default="", repr=False)
    """Goes with each call, to encoders with a file of callers, also to those whose chunks are read. Empty: none."""
    token_in_plain_text: bool = False
    """Let the token go to other hosts without TLS."""

    @classmethod
    def from_files(
        cls,
        *,
        authority: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        token: Path | None = None,
        token_in_plain_text: bool = False,
    ) -> Self:
        """Reads them.

        Args:
            authority: PEM of the authority that encoders' certificates come from; calls go by TLS. None: plain text.
            certificate: PEM of the client's own certificate chain, for encoders that demand one.
            key: PEM of its private key.
            token: holds the token.
            token_in_plain_text: let it go to other hosts without TLS.

        Raises:
            EncoderClientError: a file cannot be read, or is of no use without another.
        """
        if (certificate is None) != (key is None):
            raise EncoderClientError("a client certificate and its key go together; give both or neither")
        if certificate is not None and authority is None:
            raise EncoderClientError("a client certificate goes by TLS; give the authority of the encoders with it")
        channel = None
        if authority is not None:
            channel = grpc.ssl_channel_credentials(
                _read(authority),
                None if key is None else _read(key),
                None if certificate is None else _read(certificate),
            )
        text = "" if token is None else _read(token).decode(errors="replace").strip()
        return cls(channel, text, token_in_plain_text)

    def metadata_for(self, target: str) -> Metadata:
        """What goes with the calls to a target.

        Raises:
            EncoderClientError: the token would be readable on the way.
        """
        if not self.token:
            return ()
        if self.channel is None and not self.token_in_plain_text and not _is_local(target):
            raise EncoderClientError(
                f"the token would go to {target} in plain text; give credentials for TLS, or token_in_plain_text=True "
                "if the network is trusted"
            )
        return (("authorization", f"Bearer {self.token}"),)


def _is_local(target: str) -> bool:
    """Only processes of this host answer there."""
    if target.startswith("unix:"):
        return True
    try:
        return is_loopback(split_address(target.removeprefix("ipv4:"))[0])
    except ValueError:
        return False


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise EncoderClientError(f"cannot read {file}: {error.strerror}") from None
