"""The scheduler's side: gets the embeddings of requests into the pool before they are scheduled. It never waits.

vLLM asks at each of its steps, for each request that it could schedule, whether its embeddings are there
(:meth:`SchedulerSide.available`). The first time they are asked for at the encoders, all that a request lacks at once;
then it is answered by looking. An embedding that is there stays pinned until vLLM has computed its tokens, whatever
vLLM's own cache holds: what that evicts within a step cannot be asked for in the same step any more.

A request whose embedding cannot come is failed, alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import grpc

from encoder_client import dtypes
from encoder_client.embedding import Embedding
from encoder_client.errors import ChunkError, EncoderClientError, EncoderError, PoolError, PromptError
from encoder_client.integrations.vllm import rows
from encoder_client.integrations.vllm.stock import Stock
from encoder_client.integrations.vllm.transfer_params import Part, parse
from encoder_client.pool.pool_ledger import ALIGNMENT
from encoder_client.threads.sync_client import SyncEncoderClient

logger = logging.getLogger("encoder_client")

IDLE_PATIENCE_SECONDS = 5.0
"""After which idle embeddings give way to one that does not come: the pool's free space may be in pieces too small."""
MOST_STEPS = 64
"""After so many steps a worker has loaded what it was told, whether or not it said so: vLLM has far fewer under way."""
RESERVE = 8
"""One part in so many of the pool is left free, since free space lies in pieces."""


class Feature(NamedTuple):
    """A media item in vLLM's prompt."""

    identifier: str
    """Its key in vLLM's caches."""
    modality: str
    rows: int
    end: int
    """The place of the first token behind it."""


class Load(NamedTuple):
    """An embedding that the workers must have before the step."""

    identifier: str
    handle: bytes
    """Opens it in any process of the host."""


@dataclass
class _Prompt:
    features: Sequence[Feature]
    parts: Sequence[Part] = ()
    end: int = 0
    failed: bool = False


@dataclass
class _Fetch:
    """One embedding under way."""

    future: Future[Embedding]
    owner: str
    """The request that asked the encoders, by its own means. It alone fails with it; others ask by theirs."""
    rows: int
    begun: float
    users: set[tuple[str, int]] = field(default_factory=set)


class SchedulerSide:
    """What vLLM's scheduler knows of embeddings.

    All methods belong to the scheduler's thread, and none waits.

    Args:
        client: made with ``max_holds``, and with a pool of its own.
        pool_bytes: the pool's.
        width: of an embedding's row with its deepstack levels, as the model takes it.
        most_rows: of an embedding, that vLLM has room for. A request with more would wait for ever.
        timeout: seconds from asking the encoders to the end of a request that got no answer.
        clock: seconds, for what is late.
    """

    def __init__(
        self,
        client: SyncEncoderClient,
        pool_bytes: int,
        width: int,
        most_rows: int,
        timeout: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client = client
        self._width = width
        self._most_rows = most_rows
        self._timeout = timeout
        self._clock = clock
        self._stock = Stock(pool_bytes - pool_bytes // RESERVE)
        self._itemsize = 4  # until the first embedding tells
        self._prompts: dict[str, _Prompt] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._failed: set[str] = set()
        self._loads: dict[str, Embedding] = {}
        self._in_flight: deque[tuple[int, list[Embedding]]] = deque()
        self._step = 0
        self._looked = False
        self._full = False

    def available(
        self, request_id: str, features: Callable[[], Sequence[Feature]], params: Mapping[str, Any] | None,
        computed: int,
    ) -> bool:  # fmt: skip
        """Whether all embeddings are here that the request needs from now on; asks for those that are not.

        Args:
            request_id: the request's.
            features: its media items, in the order of the prompt. Called once for a request.
            params: its ``ec_transfer_params``.
            computed: tokens that need no computing any more.
        """
        self._look()
        prompt = self._prompts.get(request_id) or self._admit(request_id, features(), params)
        if prompt.failed:
            return False
        if computed >= prompt.end:
            return True
        missing: dict[str, list[int]] = {}
        for index, feature in enumerate(prompt.features):
            user = (request_id, index)
            if feature.end <= computed or self._stock.pin(feature.identifier, user):
                continue
            if (fetch := self._fetches.get(feature.identifier)) is not None:
                fetch.users.add(user)
            missing.setdefault(feature.identifier, []).append(index)
        new = {key: indexes for key, indexes in missing.items() if key not in self._fetches}
        if new and not self._begin(request_id, prompt, new):
            # Whoever waits for memory holds none: two requests could wait for what the other has.
            for index, feature in enumerate(prompt.features):
                self._stock.unpin(feature.identifier, (request_id, index))
        return not missing

    def has(self, identifier: str) -> bool:
        """The workers can be told to load it."""
        return self._stock.get(identifier) is not None

    def allocated(self, identifier: str) -> None:
        """Room for it is taken in vLLM's cache: the workers load it before the next step."""
        if (embedding := self._stock.get(identifier)) is not None:
            self._loads[identifier] = embedding

    def freed(self, request_id: str, index: int) -> None:
        """The tokens of a media item are computed."""
        if (prompt := self._prompts.get(request_id)) is not None:
            self._stock.unpin(prompt.features[index].identifier, (request_id, index))

    def finished(self, request_id: str) -> None:
        """The request has ended, however."""
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return
        for index, feature in enumerate(prompt.features):
            user = (request_id, index)
            self._stock.unpin(feature.identifier, user)
            if (fetch := self._fetches.get(feature.identifier)) is not None:
                fetch.users.discard(user)
                if not fetch.users:
                    self._fetches.pop(feature.identifier)
                    self._stock.withdraw(feature.identifier)
                    fetch.future.cancel()

    def take_failed(self) -> set[str]:
        """The requests whose embeddings cannot come, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def step(self) -> tuple[int, list[Load]]:
        """Ends a scheduling pass.

        Returns:
            The step's number, and what its workers load. It is kept until :meth:`loaded` tells of the step.
        """
        self._step += 1
        self._looked = self._full = False
        loads = [Load(key, self._client.share(embedding).to_bytes()) for key, embedding in self._loads.items()]
        if loads:
            self._in_flight.append((self._step, list(self._loads.values())))
            self._loads = {}
        self.loaded(self._step - MOST_STEPS)
        return self._step, loads

    def loaded(self, step: int) -> None:
        """All workers have loaded what they were told up to a step."""
        while self._in_flight and self._in_flight[0][0] <= step:
            self._in_flight.popleft()

    def _admit(self, request_id: str, features: Sequence[Feature], params: Mapping[str, Any] | None) -> _Prompt:
        prompt = self._prompts[request_id] = _Prompt(
            features, end=max((feature.end for feature in features), default=0)
        )
        try:
            prompt.parts = parse(params, [feature.identifier for feature in features])
            if (most := max((feature.rows for feature in features), default=0)) > self._most_rows:
                raise PromptError(f"an embedding has {most} rows, and vLLM's encoder cache room for {self._most_rows}")
        except EncoderClientError as error:
            self._fail(request_id, error)
        return prompt

    def _begin(self, request_id: str, prompt: _Prompt, new: Mapping[str, list[int]]) -> bool:
        """Asks the encoders, unless there is no memory now, or a request that came first waits for some."""
        if self._full:
            return False
        features = {key: prompt.features[indexes[0]] for key, indexes in new.items()}
        sizes = {key: self._bytes(feature.rows) for key, feature in features.items()}
        whole = sum({feature.identifier: self._bytes(feature.rows) for feature in prompt.features}.values())
        if whole > self._stock.budget:
            message = f"its embeddings take {whole} bytes, and {self._stock.budget} of the pool can be used"
            self._fail(request_id, PoolError(f"{message}; give it more by pool_bytes"))
            return False
        if not self._stock.promise(sizes):
            self._full = True
            return False
        try:
            futures = self._submit([(key, prompt.parts[indexes[0]]) for key, indexes in new.items()], features)
        except EncoderClientError as error:
            for key in sizes:
                self._stock.withdraw(key)
            if isinstance(error, EncoderError) and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._full = True  # the client has as much as it takes: later
            else:
                self._fail(request_id, error)
            return False
        for key, indexes in new.items():
            users = {(request_id, index) for index in indexes}
            self._fetches[key] = _Fetch(futures[key], request_id, features[key].rows, self._clock(), users)
        return True

    def _submit(
        self, parts: Sequence[tuple[str, Part]], features: Mapping[str, Feature]
    ) -> dict[str, Future[Embedding]]:
        """One prompt for each salt: a call has one."""
        futures: dict[str, Future[Embedding]] = {}
        for salt in {part.cache_salt for _, part in parts}:
            salted = [(key, part) for key, part in parts if part.cache_salt == salt]
            items = [part.source(features[key].modality) for key, part in salted]
            for place, item in enumerate(items):
                item.part_idx = place
            holders = {place: part.encoder for place, (_, part) in enumerate(salted) if part.encoder}
            submission = self._client.submit(
                items, timeout=self._timeout, cache_salt=salt, holders=holders, polled=False
            )
            futures |= {key: submission.futures[place] for place, (key, _) in enumerate(salted)}
        return futures

    def _look(self) -> None:
        """Takes in what has come, once in a pass."""
        if self._looked:
            return
        self._looked = True
        for key in [key for key, fetch in self._fetches.items() if fetch.future.done()]:
            fetch = self._fetches.pop(key)
            try:
                embedding = fetch.future.result()
                self._check(key, embedding, fetch)
            except (EncoderClientError, CancelledError) as error:
                self._stock.withdraw(key)
                self._fail(fetch.owner, error)
            else:
                self._stock.keep(key, embedding, fetch.users)
        now = self._clock()
        if any(now - fetch.begun > IDLE_PATIENCE_SECONDS for fetch in self._fetches.values()):
            self._stock.drop_idle()

    def _check(self, key: str, embedding: Embedding, fetch: _Fetch) -> None:
        """An embedding that does not fit would end the engine, not the request.

        Raises:
            ChunkError: it does not fit.
        """
        chunk = embedding.chunk
        if chunk.content_key.hex() != key:
            raise ChunkError("content_key", f"the media have the key {chunk.content_key.hex()}, and {key} was named")
        if chunk.token_count != fetch.rows:
            raise ChunkError(
                "token_count", f"the embedding has {chunk.token_count} rows, and the prompt {fetch.rows} places for it"
            )
        if (width := rows.width(chunk)) != self._width:
            raise ChunkError("tensors", f"its rows have {width} elements, and the model takes {self._width}")
        self._itemsize = dtypes.itemsize(chunk.tensors[0].dtype)

    def _bytes(self, count: int) -> int:
        return -(-count * self._width * self._itemsize // ALIGNMENT) * ALIGNMENT

    def _fail(self, request_id: str, error: BaseException) -> None:
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.failed = True
            self._failed.add(request_id)
            logger.warning("request %s fails: %s", request_id, str(error) or type(error).__name__)
