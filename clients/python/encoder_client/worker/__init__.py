"""A language-only worker as a service: a named receiver of its encoders that answers prompts.

``encoder-client worker`` starts one, which needs the extra ``language``. Its contract is ``protos/epd/language/v1``.
"""

from __future__ import annotations

from encoder_client.worker.inbox import Inbox
from encoder_client.worker.server import WorkerServer, WorkerSettings
from encoder_client.worker.servicer import LanguageServicer

__all__ = ["Inbox", "LanguageServicer", "WorkerServer", "WorkerSettings"]
