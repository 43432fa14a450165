"""``encoder-svc token``: makes a token, and its entry for the file of callers."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
from typing import Any

from epd.callers_file import Permission

TOKEN_BYTES = 32


def add_parser(subparsers: Any) -> None:
    """Adds the sub-command."""
    parser = subparsers.add_parser(
        "token",
        help="make a token for callers",
        description="Makes a random token. The entry for the file of callers goes to standard output; the token "
        "itself, which is shown only now, to standard error.",
    )
    parser.add_argument("identity", help="scopes ids, receivers, uploads and the cache; may have several tokens")
    parser.add_argument(
        "--permissions",
        default=",".join(Permission),
        help="with commas between them: encode (Encode, Upload, Cancel), read (Acquire, Subscribe, Fetch, Release, "
        "Renew), info (GetServerInfo), generate (a language-only worker's Generate); default: all",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints both."""
    try:
        permissions = [Permission(name.strip()) for name in arguments.permissions.split(",")]
    except ValueError as error:
        print(f"encoder-svc token: {error}; there are {', '.join(Permission)}", file=sys.stderr)
        return 2
    token = secrets.token_urlsafe(TOKEN_BYTES)
    # JSON's strings and lists of strings are TOML's.
    print("[[credential]]")
    print(f"identity = {json.dumps(arguments.identity)}")
    print(f"permissions = {json.dumps(permissions)}")
    print(f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    print(token, file=sys.stderr)
    return 0
