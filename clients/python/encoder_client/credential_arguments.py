"""The options of commands that call encoders."""

from __future__ import annotations

import argparse
from pathlib import Path

from encoder_client.credentials import Credentials


def add_credential_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds them to a parser, or to a group of one."""
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="PEM of the encoders' authority; calls go by TLS")
    parser.add_argument("--client-certificate", type=Path, metavar="FILE", help="PEM, for encoders that demand one")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="PEM of its private key")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token to call encoders with")


def credentials_of(arguments: argparse.Namespace, *, token_in_plain_text: bool = False) -> Credentials:
    """What the options of :func:`add_credential_arguments` say.

    Raises:
        EncoderClientError: see :meth:`Credentials.from_files`.
    """
    return Credentials.from_files(
        authority=arguments.tls_ca,
        certificate=arguments.client_certificate,
        key=arguments.client_key,
        token=arguments.token_file,
        token_in_plain_text=token_in_plain_text,
    )
