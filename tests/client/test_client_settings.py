"""What clients are told, checked before anything is connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from encoder_client import ClientSettings, Credentials, EncoderClientError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transports": ("telepathy",)}, "no transport is named 'telepathy'; there are shared_memory"),
        ({"transports": ()}, "transports is a sequence of names"),
        ({"transports": "inline"}, "transports is a sequence of names"),
        ({"receiver": "é" * 129}, "more than 256 bytes"),
        ({"expected_fingerprint": bytes(31)}, "32 bytes or none, not 31"),
        ({"read_timeout": 0.0}, "read_timeout must be more than 0"),
        ({"read_timeout": float("nan")}, "read_timeout must be more than 0"),
        ({"channels": 0}, "channels must be 1 or more"),
        ({"in_place_bytes": -1}, "in_place_bytes must be 0 or more"),
    ],
)
def test_a_value_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientSettings(**settings)


def test_credentials_come_from_files(tmp_path: Path) -> None:
    pem, token = tmp_path / "some.pem", tmp_path / "token"
    pem.write_text("PEM")
    token.write_text("secret\n")
    assert Credentials.from_files(token=token) == Credentials(token="secret")
    assert Credentials.from_files(authority=pem, certificate=pem, key=pem).channel is not None
    with pytest.raises(EncoderClientError, match="go together"):
        Credentials.from_files(authority=pem, certificate=pem)
    with pytest.raises(EncoderClientError, match="give the authority"):
        Credentials.from_files(certificate=pem, key=pem)
    with pytest.raises(EncoderClientError, match=r"cannot read .*absent: No such file"):
        Credentials.from_files(token=tmp_path / "absent")


def test_a_token_is_not_shown() -> None:
    settings = ClientSettings(Credentials(token="secret"))
    assert "secret" not in repr(settings)
