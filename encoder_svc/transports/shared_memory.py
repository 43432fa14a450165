"""The serving half of shared memory: processes of this host get the arena's descriptor from a unix socket and map it.

The descriptor is open for reading only, so a receiver cannot damage the arena by mistake. The socket is in a folder
that only this user can enter: whoever is the same user, or root, could read the whole process anyway.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from contextlib import suppress
from pathlib import Path

from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports import TransportUnavailableError
from encoder_svc.transports.serving_thread import ServingThread
from epd import arena_socket
from epd.encoder.v1.embedding_pb2 import Locator, SharedMemoryLocator

log = logging.getLogger(__name__)

MOST_RECEIVERS = 256
"""Connections at a time; more are closed at once, and their receivers take another transport."""

_HOST_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_PATH = 107  # sun_path of linux/un.h, less its zero
_BACKLOG = 64

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS = 0.5
"""Before one is tried again for which there was no descriptor: it goes on waiting, and would be tried at once."""

_Events = list[tuple[selectors.SelectorKey, int]]


class SharedMemoryServer(ServingThread[_Events]):
    """Hands out one arena, for the life of the process.

    A connection that stays open tells its receiver that the arena still is what it was: it ends with this process.

    Args:
        listener: listens on the unix socket.
        descriptor: of the arena, read-only.
        locator: see :class:`~encoder_svc.transports.TransportServer`.
        message: what each receiver is told.
    """

    def __init__(self, listener: socket.socket, descriptor: int, locator: Locator, message: bytes) -> None:
        super().__init__("shared-memory")
        self.locator = locator
        self._listener = listener
        self._descriptor = descriptor
        self._message = message
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._receivers = 0
        self._exhausted = False

    def receive(self) -> _Events:
        """Waits until receivers come or go."""
        return self._selector.select()

    def handle(self, received: _Events) -> None:
        """Serves those that have come, and closes what is left of those that have gone."""
        for key, _ in received:
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._listener:
                self._accept()
            else:
                # A receiver has nothing to say: it has gone, or it breaks the rules.
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
                self._receivers -= 1

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                if not self._exhausted:
                    log.warning("receivers of shared memory wait until the system has room again: %s", error.strerror)
                self._exhausted = True
                time.sleep(_PAUSE_SECONDS)
            return  # else the receiver has gone again
        self._exhausted = False
        try:
            if self._receivers >= MOST_RECEIVERS:
                raise BlockingIOError("there are too many receivers")
            connection.setblocking(False)
            socket.send_fds(connection, [self._message], [self._descriptor])
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionError):  # whoever asks if anybody listens goes at once
                log.warning("a receiver of shared memory was not served: %s", error)
            return
        self._selector.register(connection, selectors.EVENT_READ)
        self._receivers += 1


def serve_by_shared_memory(arena: SharedMemory, boot_id: str, path: Path) -> SharedMemoryServer:
    """Listens on a unix socket and hands out an arena.

    Args:
        arena: what receivers may read.
        boot_id: of this life of the engine (32 hex digits): receivers tell by it whose arena they got.
        path: of the socket. Its folder is made here unless an earlier life of this engine did; whoever named it removes
            it.

    Raises:
        TransportUnavailableError: it cannot listen there.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise TransportUnavailableError(
            f"the socket's path {path} is longer than {_LONGEST_PATH} bytes; set shared_memory_folder to a shorter one"
        )
    try:
        _make_private(path.parent)
        listener = _listen(path)
        # A mode that nobody may write by, too: a receiver could else open its descriptor again, for writing.
        os.fchmod(arena.descriptor, 0o400)
        descriptor = os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        host_boot_id = _HOST_BOOT_ID.read_text().strip()
    except OSError as error:
        raise TransportUnavailableError(
            f"the arena cannot be handed out at {path}: {error.strerror}; set shared_memory_folder to a folder that "
            "this user can write"
        ) from None
    locator = Locator(shared_memory=SharedMemoryLocator(host_boot_id=host_boot_id, socket_path=str(path)))
    server = SharedMemoryServer(listener, descriptor, locator, arena_socket.write(boot_id, arena.size))
    server.start()
    return server


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(0, "others can enter its folder")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    # Under another name until it listens: a socket of the final name that nobody listens on is what a killed server
    # left behind, and is removed by the next.
    beginning = path.with_suffix(".new")
    beginning.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    listener.bind(str(beginning))
    beginning.chmod(0o600)
    listener.listen(_BACKLOG)
    beginning.rename(path)
    return listener
