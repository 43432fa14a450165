"""What both children of the front share: their bond to it, and their end of the link.

A child dies with the front, and only the front stops it. It is started with the address of its link, says hello, and is
told everything else by the first command.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmq
from google.protobuf.message import Message

from encoder_svc.heap import keep_large_blocks

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_GOODBYE_MILLISECONDS = 2000

AnyMessage = TypeVar("AnyMessage", bound=Message)


class FrontLostError(Exception):
    """The front is gone, or never was: there is nobody to work for."""


class FrontLink:
    """The child's end of its link to the front: a ZeroMQ PAIR socket. It belongs to one thread.

    Args:
        address: the ipc address that the front has bound.
    """

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.PAIR)
        # The front bounds what is under way by its own counts; a mark here would only stall one of the two ends.
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.connect(address)

    def send(self, report: Message) -> None:
        """Sends a report. It never waits."""
        self.socket.send(report.SerializeToString())

    def pending(self) -> bool:
        """A command is there."""
        return bool(self.socket.poll(0))

    def receive(self, kind: type[AnyMessage]) -> tuple[AnyMessage, list[bytes]]:
        """Waits for the next command; returns it and the frames that follow it."""
        envelope, *frames = self.socket.recv_multipart()
        return kind.FromString(envelope), frames

    def close(self) -> None:
        """Waits until what was sent has left, for a short time, and closes."""
        self.socket.close(linger=_GOODBYE_MILLISECONDS)
        self.context.term()


def attach_to_front(address: str) -> FrontLink:
    """Binds this process's life to the front's, sets up its environment, and opens the link.

    To be called before torch is imported: the OpenMP runtime reads its environment once.

    Args:
        address: the only argument of the process.

    Raises:
        FrontLostError: nobody listens on ``address``.
    """
    _die_with_parent()
    # Only after the line above: a front that lives now was alive when the kernel was asked, so no death is missed.
    _check_listener(address)
    # A terminal's Ctrl-C goes to the whole group. The front stops its children when it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prepare_environment()
    return FrontLink(address)


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


def _check_listener(address: str) -> None:
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        raise FrontLostError(f"{address!r} is no ipc address; the front gives one to the processes that it starts")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            raise FrontLostError("the front does not listen on the link any more") from None


def _prepare_environment() -> None:
    # Threads that spin while they wait cost more than half of the forward when another process shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A checkpoint is a folder: transformers asks nobody for more, and draws no bars into the log.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_large_blocks()
