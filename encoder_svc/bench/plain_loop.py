"""The reference of throughput: what a program does that calls transformers for one item after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from encoder_svc.bench.media import Media, MediumName
from encoder_svc.bench.partner import end_partner
from encoder_svc.bench.run import Subject
from encoder_svc.errors import SetupError


class PlainLoop:
    """A process of its own with transformers' processor and whole model, from entering this until leaving it.

    It has the number type, the threads and the OpenMP wait policy of the server, and works only while :meth:`run` does.

    Args:
        subject: what is measured.
        medium: what it encodes.
        media: whose files it goes round.

    Raises:
        SetupError: on entering: transformers cannot load the checkpoint.
    """

    def __init__(self, subject: Subject, medium: MediumName, media: Media) -> None:
        self._subject = subject
        self._medium = medium
        self._media = media
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> Self:
        subject = self._subject
        self._folder = tempfile.TemporaryDirectory(prefix="encoder-svc-bench-")
        for number, file in enumerate(self._media.files):
            (Path(self._folder.name) / f"{number:05}{self._media.suffix}").write_bytes(file)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "encoder_svc.bench.plain_loop_process", str(subject.model), self._folder.name,
                "--medium", self._medium,
                "--dtype", subject.dtype, "--device", subject.device, "--threads", str(subject.threads),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._read()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        end_partner(self._process)
        self._log.close()
        assert self._folder is not None
        self._folder.cleanup()

    async def run(self, *, seconds: float = 0.0, images: int = 0) -> tuple[int, float]:
        """Encodes for a time, or a number of images if that is not 0.

        Returns:
            How many images, and in how many seconds: until the last one was done.
        """
        answer = await asyncio.to_thread(self._ask, {"seconds": seconds, "images": images})
        return answer["images"], answer["seconds"]

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the read tells with its reason
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            raise SetupError(f"the plain loop ended; it said: {said[-1] if said else 'nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer
