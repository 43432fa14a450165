"""``encoder-client``: the commands of this distribution."""

from __future__ import annotations

import argparse
import sys

from encoder_client.bench import command as bench
from encoder_client.errors import EncoderClientError
from encoder_client.proxy import command as proxy
from encoder_client.worker import command as worker


def main() -> None:
    """Reads the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="encoder-client", description="The language side of encoder-svc.")
    commands = parser.add_subparsers(dest="command", required=True)
    worker.add_arguments(
        commands.add_parser("worker", help="answer prompts with a language model whose towers are elsewhere")
    )
    proxy.add_arguments(
        commands.add_parser("proxy", help="take the media out of chat requests to a vLLM that has no towers")
    )
    bench.add_arguments(commands.add_parser("bench", help="measure vLLM with its own towers, and with encoders"))
    arguments = parser.parse_args()
    run = {"worker": worker.run, "proxy": proxy.run, "bench": bench.run}[arguments.command]
    try:
        sys.exit(run(arguments))
    except EncoderClientError as error:
        sys.exit(f"encoder-client: {error}")


if __name__ == "__main__":
    main()
