"""What both children of the front share: their bond to it, and their end of the link.

A child dies with the front, and only the front stops it. It inherits its end of the link, says hello, and is told
everything else by the first command.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from encoder_svc.heap import keep_large_blocks
from encoder_svc.link_messages import FILE_LENGTH_BYTES, PREFIX_BYTES, header, read_lengths, read_prefix

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_FRONT_LOST = "the front is gone"

AnyMessage = TypeVar("AnyMessage", bound=Message)


class FrontLink:
    """The child's end of its link to the front: a unix stream socket. One thread receives; any thread may send.

    Without the front there is nobody to work for: once the link has ended, each of its methods ends the process.

    Args:
        descriptor: the inherited socket, which this object then owns.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._sends = threading.Lock()

    def send(self, report: Message) -> None:
        """Sends a report. It waits only while the front is a few hundred kilobytes behind."""
        envelope = report.SerializeToString()
        with self._sends:
            try:
                self._socket.sendall(header(envelope, ()) + envelope)
            except OSError:
                sys.exit(_FRONT_LOST)

    def pending(self) -> bool:
        """A command is there, or has begun to come."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self, kind: type[AnyMessage]) -> tuple[AnyMessage, list[bytes]]:
        """Waits for the next command; returns it and the files that follow it."""
        envelope_bytes, files = read_prefix(self._read(PREFIX_BYTES))
        lengths = read_lengths(self._read(FILE_LENGTH_BYTES * files)) if files else []
        command = kind.FromString(self._read(envelope_bytes))
        return command, [self._read(length) for length in lengths]

    def end(self) -> None:
        """Ends the link: the thread that receives, or will, ends the process. What was sent still arrives."""
        self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Closes this end. What was sent still arrives."""
        self._socket.close()

    def _read(self, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        try:
            # In one piece, unless a signal comes between: bytes that nobody has to copy.
            data = self._socket.recv(nbytes, socket.MSG_WAITALL)
            while 0 < len(data) < nbytes:
                more = self._socket.recv(nbytes - len(data), socket.MSG_WAITALL)
                if not more:
                    sys.exit(_FRONT_LOST)
                data += more
        except OSError:
            sys.exit(_FRONT_LOST)
        except MemoryError:
            # What follows in the stream could not be understood any more.
            sys.exit(f"a file of {nbytes} bytes does not fit into this process's memory")
        if not data:
            sys.exit(_FRONT_LOST)
        return data


def attach_to_front(descriptor: str) -> FrontLink:
    """Binds this process's life to the front's, sets up its environment, and opens the link.

    To be called before torch is imported: the OpenMP runtime reads its environment once.

    Args:
        descriptor: the number of the inherited socket, which is the only argument of the process.
    """
    if not descriptor.isdecimal():
        sys.exit(f"{descriptor!r} is no descriptor of a link; the front gives one to the processes that it starts")
    try:
        link = FrontLink(int(descriptor))
    except OSError:
        sys.exit(f"descriptor {descriptor} is no link; the front gives one to the processes that it starts")
    # A front that died before this line has closed its end of the link, which the first receive sees.
    _die_with_parent()
    # A terminal's Ctrl-C goes to the whole group. The front stops its children when it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prepare_environment()
    return link


@contextmanager
def without_collection() -> Iterator[None]:
    """Makes what stays for the life of the process, such as modules and towers, without searching it for garbage.

    An import of transformers takes a fifth less, and no later collection goes through what was made.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _die_with_parent() -> None:
    # The kernel sends the signal when the *thread* that started this process ends: the front starts children from its
    # main thread.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _prepare_environment() -> None:
    # Threads that spin while they wait cost more than half of the forward when another process shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A checkpoint is a folder: transformers asks nobody for more, and draws no bars into the log.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_large_blocks()
