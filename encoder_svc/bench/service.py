"""A server of its own for a measurement, as a process."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

from encoder_svc.errors import SetupError

if TYPE_CHECKING:
    import psutil

START_SECONDS = 300.0
STOP_SECONDS = 20.0
_READY = re.compile(r"encoder-svc ready target=(\S+)")
_ROLES = {"encoder_svc.engine.process": "engine", "encoder_svc.media.worker": "media worker"}


class Service:
    """``encoder-svc serve`` on a free port of the loopback, from entering this object until leaving it.

    Args:
        settings: by their names in :class:`encoder_svc.settings.Settings`; ``model`` at least.

    Raises:
        SetupError: on entering: it does not serve; the message holds what it said.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = {"listen": "127.0.0.1:0", "log_level": "warning", "drain_seconds": "2", **settings}
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.target = ""

    def __enter__(self) -> Self:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "encoder_svc.cli.main", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # A session of its own: Ctrl-C is for this process, which then stops the server; and the scheduler shares
            # the cores between caller and server as it would between two services.
            start_new_session=True,
        )
        try:
            self.target = self._await_ready(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._log.close()

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The live processes of the server: ``front``, ``media worker``, ``engine``."""
        library = load_psutil()
        assert self._process is not None
        front = library.Process(self._process.pid)
        found: dict[str, list[psutil.Process]] = {"front": [front]}
        for child in front.children(recursive=True):
            try:
                words = child.cmdline()
            except library.Error:  # it ended just now
                continue
            role = next((_ROLES[word] for word in words if word in _ROLES), None)
            if role is not None:
                found.setdefault(role, []).append(child)
        return found

    def _await_ready(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in process.stdout:
                if found := _READY.match(line):
                    return found[1]
        finally:
            watchdog.cancel()
        process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        raise SetupError(f"the server to be measured does not serve; it said:\n{said}")


def load_psutil() -> ModuleType:
    """psutil, which is optional.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import psutil
    except ImportError:
        raise SetupError("memory of processes is read with psutil: `pip install 'encoder-svc[bench]'`") from None
    module: ModuleType = psutil
    return module


def cached_checkpoint(family: str, preset: str, cache: Path) -> Path:
    """The folder of a random checkpoint, written on the first call.

    Args:
        family: the ``model_type``.
        preset: ``tiny``, ``small`` or ``base``.
        cache: where such checkpoints are kept.

    Raises:
        SetupError: it cannot be written.
    """
    folder = cache / f"{family}-{preset}"
    if (folder / "config.json").exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot make {cache}: {error.strerror}; give --model a checkpoint") from None
    with tempfile.TemporaryDirectory(dir=cache, prefix="writing-") as made:
        # A process of its own: this one is the caller, and must not be slowed by torch.
        written = Path(made) / "checkpoint"
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "encoder_svc.cli.main",
                "tiny-checkpoint",
                family,
                written,
                "--preset",
                preset,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SetupError(f"no checkpoint could be written: {result.stderr.strip()}")
        try:
            # Renamed when it is whole: another run at the same time sees all of it or nothing.
            written.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise SetupError(f"cannot write {folder}; give --model a checkpoint") from None
    return folder
