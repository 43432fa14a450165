"""Where engines put the unix sockets that hand out their arenas, and that nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "encoder-svc-arena-"
_NAME = "arena"


class ArenaSockets:
    """One folder for the socket of each engine. Engines make them; this object names and removes them.

    Args:
        parent: where the folders are. None: where temporary files are.
        instance_id: of the server, whose folders have names that no other server's have.
    """

    def __init__(self, parent: Path | None, instance_id: str) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        self._own = f"{_PREFIX}{instance_id[:16]}-"

    def path(self, engine: int) -> Path:
        """The socket of an engine, through all its lives."""
        return self._parent / f"{self._own}{engine}" / _NAME

    def remove_leftovers(self) -> None:
        """Removes what servers of this user left behind that were killed: sockets that nobody listens on."""
        for folder in self._parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid() and _is_deserted(folder / _NAME):
                    shutil.rmtree(folder)

    def remove(self) -> None:
        """Removes this server's."""
        for folder in self._parent.glob(f"{self._own}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _is_deserted(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
