"""The command ``encoder-svc``. A sub-command's module is imported only when it is called: help comes at once."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from encoder_svc.errors import SetupError

COMMANDS = {
    "serve": ("serve", "load the towers of a checkpoint and serve them"),
    "encode": ("encode", "send media files to a server and show what comes back"),
    "bench": ("bench", "measure a server of its own beside its reference"),
    "doctor": ("doctor", "tell what works on this machine, and how to mend what does not"),
    "models": ("models", "list the model families that can be served"),
    "token": ("token", "make a token for callers"),
    "tiny-checkpoint": ("tiny_checkpoint", "write a small random checkpoint, to try things without a download"),
}
"""Each sub-command: its module in this folder, and its line in the help."""

_EPILOG = """\
examples:
  encoder-svc tiny-checkpoint qwen2_5_vl /tmp/tiny
  encoder-svc serve --model /tmp/tiny
  encoder-svc encode --target 127.0.0.1:50051 photo.jpg
  encoder-svc doctor

`encoder-svc COMMAND --help` tells the options of a command.
"""

EXIT_SETUP = 2
"""The command cannot run as it was called; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command.

    Returns:
        Its exit code; 2 when it cannot run as it was called.
    """
    _hold_standard_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    # gRPC's core writes lines of its own to stderr; what matters of them is told in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = argparse.ArgumentParser(
        prog="encoder-svc",
        description="Serves the vision and audio towers of multimodal checkpoints over gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"encoder-svc {version('encoder-svc')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (module, text) in COMMANDS.items():
        if given and given[0] == command:
            importlib.import_module(f"encoder_svc.cli.{module}").add_parser(subparsers)
        else:
            subparsers.add_parser(command, help=text)
    parsed = parser.parse_args(given)
    try:
        code: int | None = parsed.func(parsed)
    except SetupError as error:
        print(f"encoder-svc {parsed.command}: {error}", file=sys.stderr)
        return EXIT_SETUP
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left, such as `head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _hold_standard_streams() -> None:
    """Opens those that whoever started the command has closed: a socket in their place would get what is logged."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)


if __name__ == "__main__":
    sys.exit(main())
