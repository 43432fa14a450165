"""The token that tells encoders who calls, and where it may go."""

from __future__ import annotations

import ipaddress

import grpc

from encoder_client.errors import EncoderClientError
from encoder_client.stub import Metadata


class CallerToken:
    """A bearer token, or none.

    Args:
        token: goes with each call. Empty: none.
        credentials: TLS of the channels; None: they speak plain text.
        in_plain_text: it may go to other hosts without TLS.
    """

    def __init__(
        self, token: str = "", credentials: grpc.ChannelCredentials | None = None, *, in_plain_text: bool = False
    ) -> None:
        self._metadata: Metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._anywhere = credentials is not None or in_plain_text

    def metadata_for(self, target: str) -> Metadata:
        """What goes with the calls to a target.

        Raises:
            EncoderClientError: the token would be readable on the way.
        """
        if self._metadata and not self._anywhere and not _is_loopback(target):
            raise EncoderClientError(
                f"the token would go to {target} in plain text; give credentials for TLS, or token_in_plain_text=True "
                "if the network is trusted"
            )
        return self._metadata


def _is_loopback(target: str) -> bool:
    """Only processes of this host answer there."""
    if target.startswith("unix:"):
        return True
    host = target.removeprefix("ipv4:").rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
