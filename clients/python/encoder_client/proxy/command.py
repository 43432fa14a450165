"""``encoder-client proxy``: the proxy as a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

from encoder_client.credential_arguments import add_credential_arguments, credentials_of
from encoder_client.errors import EncoderClientError
from epd.addresses import is_loopback, split_address

if TYPE_CHECKING:
    from encoder_client.proxy.server import ProxySettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--encoders", required=True, help="gRPC targets, with commas between them")
    parser.add_argument("--vllm", required=True, metavar="URL", help="the language-only engine: http://HOST:PORT")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--allow-insecure", action="store_true", help="serve other hosts, and send the token to them, in plain text"
    )
    add_credential_arguments(parser)
    parser.add_argument("--encode-seconds", type=float, default=60.0, help="deadline of a request's media")
    parser.add_argument("--max-body-bytes", type=int, default=64 << 20, help="the largest chat request")
    parser.add_argument("--max-requests", type=int, default=1024, help="chat requests at once")
    parser.add_argument(
        "--stall-seconds", type=float, default=60.0, help="for a request to come, and for its caller to take some more"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code.

    Raises:
        EncoderClientError: it cannot serve as it is set up.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        from encoder_client.proxy.server import ProxySettings
    except ImportError as error:
        message = f"the proxy needs the extra: pip install 'encoder-client[proxy]' ({error})"
        raise EncoderClientError(message) from None
    try:
        host, port = split_address(arguments.listen)
    except ValueError:
        raise EncoderClientError(f"--listen takes HOST:PORT, not {arguments.listen}") from None
    if not arguments.allow_insecure and not is_loopback(host):
        raise EncoderClientError(
            f"listening on {arguments.listen} would serve other hosts in plain text; listen on 127.0.0.1, or allow it "
            "by --allow-insecure if the network is trusted"
        )
    settings = ProxySettings(
        encoders=tuple(name.strip() for name in arguments.encoders.split(",") if name.strip()),
        vllm=arguments.vllm,
        encode_seconds=arguments.encode_seconds,
        max_body_bytes=arguments.max_body_bytes,
        max_requests=arguments.max_requests,
        stall_seconds=arguments.stall_seconds,
        credentials=credentials_of(arguments, token_in_plain_text=arguments.allow_insecure),
    )
    return asyncio.run(_serve(settings, host, port))


async def _serve(settings: ProxySettings, host: str, port: int) -> int:
    from encoder_client.proxy.server import serving

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(settings, host, port) as address:
        print(f"encoder-client proxy ready address={address}", flush=True)
        await stop.wait()
    return 0
