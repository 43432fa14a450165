"""``Generate``: waits for a prompt's embeddings, and answers."""
# gRPC's names are not ours to choose.
# ruff: noqa: N802

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError, EncoderError, PoolError
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.worker.assembly import Assembly, PartsLateError, give_back
from encoder_client.worker.generation import GenerationThread
from encoder_client.worker.inbox import Inbox
from epd.callers import CallerForbiddenError, Callers, CallerUnknownError
from epd.callers_file import Permission
from epd.damaged_messages import DAMAGED, DAMAGED_TEXT, tolerant
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import Modality
from epd.language.v1 import language_service_pb2 as pb
from epd.language.v1.language_service_pb2_grpc import LanguageServiceServicer

SERVICE = pb.DESCRIPTOR.services_by_name["LanguageService"].full_name
MAX_NAME_BYTES = 256
DEFAULT_TOKENS = 128

_CONTENT_TYPES = {
    Modality.MODALITY_IMAGE: "image",
    Modality.MODALITY_VIDEO: "video",
    Modality.MODALITY_AUDIO: "audio",
}

logger = logging.getLogger("encoder_client")


class LanguageModel(Protocol):
    """What the service needs of :class:`~encoder_client.language.LanguageOnlyModel`."""

    def expand(self, prompt: Any, layouts: Sequence[EmbeddingChunk]) -> Any:
        """Makes room for the parts' rows. Returns a prompt whose ``input_ids`` have shape (1, tokens)."""
        ...

    def stream(self, prompt: Any, embeddings: Sequence[Embedding], *, max_new_tokens: int) -> Iterator[int]:
        """Generates token by token."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens."""
        ...


class RefusedError(Exception):
    """A prompt is not answered.

    Args:
        code: of the status.
        message: what is wrong, and what to do.
        reason: as an encoder would name it, for programs. Empty: the code says all.
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


class LanguageServicer(LanguageServiceServicer):
    """Answers prompts with a language-only model.

    Args:
        model: who answers; one prompt at a time.
        inbox: where embeddings are announced.
        pool: where they are read to.
        receiver: the name that encoders know this worker by.
        callers: decides who may call.
        max_tokens: tokens of an answer at most.
        space_timeout: seconds that a prompt waits for space in the pool.
        part_timeout: seconds that a prompt waits for parts of which nothing new is told.
    """

    def __init__(
        self,
        model: LanguageModel,
        inbox: Inbox,
        pool: EmbeddingPool,
        receiver: str,
        callers: Callers,
        *,
        max_tokens: int = 4096,
        space_timeout: float = 30.0,
        part_timeout: float = 120.0,
    ) -> None:
        self._model = model
        self._inbox = inbox
        self._pool = pool
        self._receiver = receiver
        self._callers = callers
        self._max_tokens = max_tokens
        self._space_timeout = space_timeout
        self._part_timeout = part_timeout
        self._generations = GenerationThread()
        self.stopping = False
        """No new prompt is taken."""

    def serve_by(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started; the generated function would raise at damaged messages."""
        generate: Any = grpc.unary_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=tolerant(pb.GenerateRequest.FromString),
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate}),))

    def close(self) -> None:
        """Ends the thread of the model."""
        self._generations.close()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Writes the events of the answer."""
        try:
            self._admit(context)
            if request is DAMAGED:
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, DAMAGED_TEXT, "REQUEST_INVALID")
            messages, num_parts = self._check(request)
            parts = self._inbox.open(request.prompt_id)
            try:
                accepted = pb.Accepted(receiver_id=self._receiver, num_parts=num_parts)
                await context.write(pb.GenerateResponse(accepted=accepted))
                limits = self._space_timeout, self._part_timeout
                async with Assembly(parts, num_parts, self._pool, *limits) as assembly:
                    await self._answer(messages, assembly, request.max_new_tokens, context)
            finally:
                await give_back(self._inbox.close(parts))
        except RefusedError as error:
            if error.reason:
                told = _status(error.code, error.message, error.reason).SerializeToString()
                context.set_trailing_metadata((("grpc-status-details-bin", told),))
            await context.abort(error.code, error.message)
        except PoolError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except PartsLateError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except EncoderClientError as error:
            # Parts and prompt do not fit together.
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception:
            if context.done():
                # The caller left while a message was being written: there is nobody to tell.
                return
            logger.exception("unexpected error in Generate")
            await context.abort(grpc.StatusCode.INTERNAL, "a fault of the worker; its log says more")

    def _admit(self, context: Any) -> None:
        try:
            self._callers.admit(context, Permission.GENERATE)
        except CallerUnknownError as error:
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, str(error), "CALLER_UNKNOWN") from None
        except CallerForbiddenError as error:
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, str(error), "CALLER_FORBIDDEN") from None

    def _check(self, request: pb.GenerateRequest) -> tuple[list[dict[str, Any]], int]:
        """The conversation as chat templates take it, and how many parts it has."""
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        if self.stopping:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "the worker is stopping; ask another one")
        if not request.prompt_id or len(request.prompt_id.encode()) > MAX_NAME_BYTES:
            raise RefusedError(invalid, f"prompt_id is required, and has at most {MAX_NAME_BYTES} bytes")
        if not request.messages:
            raise RefusedError(invalid, "messages: a prompt needs at least one")
        if self._inbox.is_open(request.prompt_id):
            raise RefusedError(grpc.StatusCode.ALREADY_EXISTS, "a prompt with this prompt_id is being answered")
        if self._inbox.full:
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the worker has as many prompts as it may; wait")
        messages = _messages_of(request)
        num_parts = sum(content["type"] != "text" for message in messages for content in message["content"])
        if not num_parts:
            raise RefusedError(invalid, "messages: a prompt without media needs no encoder; ask a language server")
        return messages, num_parts

    async def _answer(
        self, messages: list[dict[str, Any]], assembly: Assembly, max_new_tokens: int, context: Any
    ) -> None:
        async def missing(part_idx: int, error: EncoderClientError) -> None:
            logger.info("part %d of a prompt is missing: %s", part_idx, error)
            told = pb.PartMissing(part_idx=part_idx, status=_status_of(error))
            await context.write(pb.GenerateResponse(part_missing=told))

        embeddings = await assembly.collect(missing)
        prompt = self._model.expand(messages, assembly.layouts)
        expanded = pb.Expanded(prompt_tokens=prompt.input_ids.shape[1])
        await context.write(pb.GenerateResponse(expanded=expanded))
        limit = min(max_new_tokens or DEFAULT_TOKENS, self._max_tokens)
        token_ids: list[int] = []
        stream = self._generations.stream(lambda: self._model.stream(prompt, embeddings, max_new_tokens=limit))
        async with stream as batches:
            async for batch in batches:
                token_ids += batch
                await context.write(pb.GenerateResponse(tokens=pb.Tokens(token_ids=batch)))
        finished = pb.Finished(text=self._model.decode(token_ids), generated_tokens=len(token_ids))
        await context.write(pb.GenerateResponse(finished=finished))


def _messages_of(request: pb.GenerateRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates take it."""
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(request.messages):
        entries: list[dict[str, str]] = []
        for j, content in enumerate(message.content):
            if content.WhichOneof("content") == "text":
                entries.append({"type": "text", "text": content.text})
            elif content.media in _CONTENT_TYPES:
                entries.append({"type": _CONTENT_TYPES[content.media]})
            else:
                where = f"messages[{i}].content[{j}]"
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"{where} is neither text nor a known modality")
        messages.append({"role": message.role, "content": entries})
    return messages


def _status_of(error: EncoderClientError) -> Status:
    """As gRPC says it: an encoder's own error as it is, a read that failed as UNAVAILABLE."""
    if not isinstance(error, EncoderError):
        return _status(grpc.StatusCode.UNAVAILABLE, str(error), "")
    return _status(error.code, error.message, error.reason)


def _status(code: grpc.StatusCode, message: str, reason: str) -> Status:
    status = Status(code=code.value[0], message=message)
    if reason:
        status.details.add().Pack(ErrorInfo(reason=reason, domain="encoder-svc"))
    return status
