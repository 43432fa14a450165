"""How a client reaches encoders and reads from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from encoder_client.credentials import Credentials
from encoder_client.transports import TRANSPORTS

FINGERPRINT_BYTES = 32
MAX_NAME_BYTES = 256
"""Of a receiver's name, by the contract."""


@dataclass(frozen=True)
class ClientSettings:
    """The same for a client of one encoder, of a fleet, and of a thread.

    Raises:
        ValueError: a value cannot be.

    Example:
        >>> EncoderClient("encoder:50051", ClientSettings(receiver="lm-3", transports=("mooncake", "inline")))
    """

    credentials: Credentials = field(default_factory=Credentials)
    """For all encoders, also those whose chunks are read."""
    receiver: str = ""
    """The name under which leases are granted to this process. Empty: the caller of ``Encode``."""
    transports: Sequence[str] = TRANSPORTS
    """Names, the preferred first. One that cannot be loaded here is left out, with a line in the log; one that does not
    reach an encoder is passed over."""
    mooncake_host: str = ""
    """The address of this host for Mooncake peers. Empty: found from the route to the encoder."""
    mooncake_devices: str = ""
    """RDMA devices of this host, with commas between them. Empty: all."""
    expected_fingerprint: bytes = b""
    """32 bytes: only embeddings of exactly these weights, dtype, preprocessing and width are taken. Empty: any."""
    read_timeout: float = 30.0
    """Seconds that a read may take, waiting for space not counted, and for space again as many."""
    channels: int = 2
    """Connections to each encoder. With one, calls wait behind large reads in band."""
    in_place_bytes: int = 256 << 20
    """Of all embeddings that ``read_in_place`` leaves in the encoder's memory at a time."""

    def __post_init__(self) -> None:
        if isinstance(self.transports, str) or not self.transports:
            raise ValueError(f"transports is a sequence of names, such as {TRANSPORTS}, not {self.transports!r}")
        if unknown := [name for name in self.transports if name not in TRANSPORTS]:
            raise ValueError(f"no transport is named {unknown[0]!r}; there are {', '.join(TRANSPORTS)}")
        if len(self.receiver.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"receiver has more than {MAX_NAME_BYTES} bytes")
        if len(self.expected_fingerprint) not in (0, FINGERPRINT_BYTES):
            raise ValueError(
                f"expected_fingerprint has {FINGERPRINT_BYTES} bytes or none, not {len(self.expected_fingerprint)}; "
                "GetServerInfo tells the one of an encoder: model.compatibility_fingerprint"
            )
        if not self.read_timeout > 0:
            raise ValueError(f"read_timeout must be more than 0 seconds, not {self.read_timeout}")
        if self.channels < 1:
            raise ValueError(f"channels must be 1 or more, not {self.channels}")
        if self.in_place_bytes < 0:
            raise ValueError(f"in_place_bytes must be 0 or more, not {self.in_place_bytes}")
