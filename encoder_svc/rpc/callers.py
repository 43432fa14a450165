"""Who calls the encoder: :mod:`epd.callers`, with the encoder's own errors."""

from __future__ import annotations

from typing import Any

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.settings import Settings
from epd.callers import CallerForbiddenError, Callers, CallerUnknownError
from epd.callers_file import Permission


class EncoderCallers:
    """Decides who calls.

    Args:
        settings: they name the file of callers, which is read once.

    Raises:
        SetupError: it cannot be read, or says what cannot be.
    """

    def __init__(self, settings: Settings) -> None:
        try:
            self._callers = Callers.from_file(settings.callers, settings.listening)
        except ValueError as error:
            raise SetupError(str(error)) from None

    def admit(self, context: Any, permission: Permission) -> str:
        """Lets a call in. Returns the identity that scopes the caller's ids.

        Raises:
            ServiceError: the caller is not known, or may not do this.
        """
        try:
            return self._callers.admit(context, permission)
        except CallerUnknownError as error:
            raise ServiceError(Reason.CALLER_UNKNOWN, str(error)) from None
        except CallerForbiddenError as error:
            raise ServiceError(Reason.CALLER_FORBIDDEN, str(error)) from None
