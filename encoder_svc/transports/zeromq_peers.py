"""How many peers a ZeroMQ socket serves at a time: ZeroMQ itself takes as many as the process has descriptors."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import OrderedDict
from contextlib import ExitStack, suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from encoder_svc.transports.serving_thread import ServingThread

log = logging.getLogger(__name__)

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""Of a socket's monitor, for :class:`ZeroMqPeers`."""

MOST_PEERS = 256
"""Connections at a time."""


class ZeroMqPeers(ServingThread[list[bytes]]):
    """Ends a connection for each that comes beyond :data:`MOST_PEERS`: the oldest of those that have read nothing.

    If all have read, the one goes whose last piece is the longest ago. So who opens connections and has no key of a
    slot takes places from his like, and readers keep theirs; one that loses its place while it is idle connects again.

    Args:
        monitor: of a bound socket, for :data:`EVENTS`; it belongs to this thread from now on.
        port: where the socket is bound.
    """

    def __init__(self, monitor: zmq.Socket[bytes], port: int) -> None:
        super().__init__("zeromq-peers")
        self._monitor = monitor
        self._port = port
        self._lock = threading.Lock()
        self._strangers: OrderedDict[int, None] = OrderedDict()
        """Descriptors of connections, the oldest first."""
        self._readers: OrderedDict[int, None] = OrderedDict()
        """The one that read least recently first."""
        self._early: set[int] = set()
        """Connections that have read before the monitor told of their coming."""
        self._full = False

    def has_read(self, descriptor: int) -> None:
        """A piece goes to a connection. Called by the thread that answers."""
        with self._lock:
            if descriptor in self._readers:
                self._readers.move_to_end(descriptor)
            elif descriptor in self._strangers:
                del self._strangers[descriptor]
                self._readers[descriptor] = None
            else:
                self._early.add(descriptor)

    def receive(self) -> list[bytes]:
        """Waits for an event of the monitor. The thread sleeps unless a peer comes or goes."""
        return self._monitor.recv_multipart()

    def handle(self, received: list[bytes]) -> None:
        """Notes who has come or gone, and ends whom there is no place for."""
        message = parse_monitor_message(received)
        descriptor: int = message["value"]
        if message["event"] == zmq.EVENT_ACCEPTED:
            self._come(descriptor)
        else:
            with self._lock:
                self._strangers.pop(descriptor, None)
                self._readers.pop(descriptor, None)
                # What it asked for may have been answered after it was told to go.
                self._early.discard(descriptor)

    def _come(self, descriptor: int) -> None:
        with self._lock:
            if descriptor in self._early:
                self._early.remove(descriptor)
                self._readers[descriptor] = None
            else:
                self._strangers[descriptor] = None
            number = len(self._strangers) + len(self._readers)
            surplus = None
            if number > MOST_PEERS:
                # The newest may have had no time to read yet.
                surplus, _ = (self._strangers if len(self._strangers) > 1 else self._readers).popitem(last=False)
        if surplus is None:
            # To be said again once most have gone.
            self._full = self._full and number > MOST_PEERS // 2
            return
        if not self._full:
            log.warning("ZeroMQ has %d peers, the most that it serves; the idlest go for those that come", MOST_PEERS)
        self._full = True
        self._end(surplus)

    def _end(self, descriptor: int) -> None:
        """Ends a connection, as its other side would: ZeroMQ sees that, and cleans up.

        The descriptor is ZeroMQ's, and may be closed by now and used for something else. A copy stays what it is, and
        is left alone unless it is a connection to the same port.
        """
        with suppress(OSError), ExitStack() as stack:
            copy = os.dup(descriptor)
            stack.callback(os.close, copy)
            connection = socket.socket(fileno=copy)
            stack.callback(connection.detach)
            if connection.type == socket.SOCK_STREAM and connection.getsockname()[1:2] == (self._port,):
                connection.shutdown(socket.SHUT_RDWR)
