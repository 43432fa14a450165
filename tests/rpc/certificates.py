"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def make_authority(folder: Path) -> Certificate:
    """A self-signed authority."""
    files = Certificate(folder / "authority.pem", folder / "authority.key")
    _openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=authority",
        "-days",
        "2",
        "-keyout",
        str(files.key),
        "-out",
        str(files.certificate),
    )
    return files


def make_certificate(folder: Path, authority: Certificate, name: str) -> Certificate:
    """A certificate of ``name``, good for connections to 127.0.0.1 too."""
    files = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    request = folder / f"{name}.csr"
    extensions = folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1")
    _openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", str(files.key), "-out", str(request)
    )
    _openssl(
        "x509",
        "-req",
        "-in",
        str(request),
        "-CA",
        str(authority.certificate),
        "-CAkey",
        str(authority.key),
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        str(extensions),
        "-out",
        str(files.certificate),
    )
    return files


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
