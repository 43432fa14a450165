"""Media that were sent ahead, piece by piece, until a request names them or their time is over."""

from __future__ import annotations

import hashlib
import io
import secrets
from dataclasses import dataclass, field

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.timers import Timer, Timers


@dataclass(eq=False, slots=True)
class Upload:
    """One file on its way, or here."""

    identity: str
    total_bytes: int
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    buffer: io.BytesIO = field(default_factory=io.BytesIO, repr=False)
    """One block: a file that comes in single bytes costs no more memory than another."""
    nbytes: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256, repr=False)
    timer: Timer | None = None


class Uploads:
    """All uploads of a server.

    Args:
        max_file_bytes: the largest file.
        max_bytes: all files together, as announced.
        seconds: how long a file is kept after its last byte, and how long it may take to come.
        timers: where these are set.
    """

    def __init__(self, max_file_bytes: int, max_bytes: int, seconds: float, timers: Timers) -> None:
        self._max_file_bytes = max_file_bytes
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._timers = timers
        self._open: dict[str, Upload] = {}
        self._whole: dict[tuple[str, str], Upload] = {}
        self.bytes = 0

    def begin(self, identity: str, total_bytes: int, now: float) -> Upload:
        """Reserves room for a file.

        Raises:
            ServiceError: it is too large, or there is no room now.
        """
        if total_bytes == 0:
            raise ServiceError(Reason.MEDIA_EMPTY, "total_bytes is 0; send a whole file", field="header.total_bytes")
        if total_bytes > self._max_file_bytes:
            raise ServiceError(
                Reason.MEDIA_TOO_LARGE,
                f"the file has {total_bytes} bytes and an upload may have {self._max_file_bytes}",
                field="header.total_bytes",
            )
        if self.bytes + total_bytes > self._max_bytes:
            raise ServiceError(
                Reason.ADMISSION_FULL, "the server holds as many uploads as it may; try again later", retry_after=1.0
            )
        upload = Upload(identity, total_bytes)
        self.bytes += total_bytes
        self._open[upload.id] = upload
        self._set_timer(upload, now)
        return upload

    def add(self, upload: Upload, piece: bytes) -> None:
        """Takes the next bytes.

        Raises:
            ServiceError: they are more than announced, or the upload's time is over.
        """
        if upload.id not in self._open:
            raise ServiceError(Reason.UPLOAD_UNKNOWN, f"the upload took longer than {self._seconds:g} s; begin again")
        upload.nbytes += len(piece)
        if upload.nbytes > upload.total_bytes:
            raise ServiceError(
                Reason.REQUEST_INVALID, f"more than the {upload.total_bytes} bytes that were announced", field="piece"
            )
        upload.hash.update(piece)
        upload.buffer.write(piece)

    def finish(self, upload: Upload, sha256: bytes, now: float) -> bytes:
        """The last piece has come. Returns the file's SHA-256.

        Raises:
            ServiceError: bytes are missing, or they are not those that ``sha256`` names.
        """
        if upload.id not in self._open:
            raise ServiceError(Reason.UPLOAD_UNKNOWN, f"the upload took longer than {self._seconds:g} s; begin again")
        if upload.nbytes != upload.total_bytes:
            raise ServiceError(
                Reason.MEDIA_TRUNCATED,
                f"{upload.nbytes} of the {upload.total_bytes} bytes that were announced have come; send all of them",
            )
        digest = upload.hash.digest()
        if sha256 not in (b"", digest):
            raise ServiceError(
                Reason.MEDIA_DIGEST_MISMATCH,
                "the bytes are not those that sha256 names; send them again",
                field="header",
            )
        del self._open[upload.id]
        self._whole[upload.identity, upload.id] = upload
        self._set_timer(upload, now)
        return digest

    def abandon(self, upload: Upload) -> None:
        """Its sender is gone. Of no effect on one that is whole."""
        if self._open.pop(upload.id, None) is not None:
            self._drop(upload)

    def take(self, identity: str, upload_id: str) -> tuple[bytes, bytes]:
        """The file and its SHA-256. It stays until its time is over, so that several requests can name it.

        Raises:
            ServiceError: there is none of that name.
        """
        upload = self._whole.get((identity, upload_id))
        if upload is None:
            raise ServiceError(
                Reason.UPLOAD_UNKNOWN,
                f"no such upload; uploads are forgotten {self._seconds:g} s after their last byte: send it again",
            )
        return upload.buffer.getvalue(), upload.hash.digest()

    def _set_timer(self, upload: Upload, now: float) -> None:
        if upload.timer is not None:
            upload.timer.cancel()
        upload.timer = self._timers.at(now + self._seconds, lambda _: self._expire(upload))

    def _expire(self, upload: Upload) -> None:
        self._open.pop(upload.id, None)
        self._whole.pop((upload.identity, upload.id), None)
        self._drop(upload)

    def _drop(self, upload: Upload) -> None:
        self.bytes -= upload.total_bytes
        upload.buffer = io.BytesIO()
        if upload.timer is not None:
            upload.timer.cancel()
