"""One thread, many descriptors, and deadlines: the event loop of agent and driver. It never polls."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Any

from distsdk.wire.channel import Channel, ChannelClosed
from distsdk.wire.messages import Message

OnMessage = Callable[[Message, list[int]], None]
OnClosed = Callable[[], None]
OnRoom = Callable[[], None]
LONGEST_SLEEP_S = 1e6
"""The kernel refuses to sleep for much longer; the loop then sleeps again."""


class Loop:
    """Calls back when a descriptor is readable, a message has come, or a time has passed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channels: dict[Channel, tuple[OnMessage, OnClosed, OnRoom | None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._running = True

    def watch(self, descriptor: Any, callback: Callable[[], None]) -> None:
        """Call back whenever `descriptor` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def unwatch(self, descriptor: Any) -> None:
        """Forget a descriptor or channel; harmless if it is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)
        self._channels.pop(descriptor, None)

    def talk(self, channel: Channel, on_message: OnMessage, on_closed: OnClosed, on_room: OnRoom | None = None) -> None:
        """Deliver the messages of `channel`, in order; `on_closed` once, when it ended (it is unwatched before).

        `on_room`: when the kernel has taken everything after it had not.
        """
        self._channels[channel] = (on_message, on_closed, on_room)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self.deliver(channel))

    def deliver(self, channel: Channel) -> None:
        """Read what has arrived on `channel` now."""
        if channel not in self._channels:
            return
        on_message, on_closed, on_room = self._channels[channel]
        try:
            if channel.backlog_bytes:
                channel.flush()
                if on_room and not channel.backlog_bytes:
                    on_room()
            for message, descriptors in channel.receive():
                on_message(message, descriptors)
        except ChannelClosed:
            self.unwatch(channel)
            on_closed()

    def drain(self, channel: Channel) -> None:
        """Deliver everything that has arrived on `channel`, whose sender is gone."""
        channel.is_dry = False
        while channel in self._channels and not channel.is_dry:
            self.deliver(channel)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back once, `delay_s` seconds from now; inf is never, what is no number is at once."""
        heapq.heappush(self._timers, (time.monotonic() + max(0.0, delay_s), next(self._order), callback))

    def stop(self) -> None:
        """Return from `run` after the current callback."""
        self._running = False

    def run(self) -> None:
        """Until `stop`."""
        while self._running:
            self._ask_for_room()
            for key, _ in self._selector.select(self._time_left()):
                if self._running and self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._run_timers()

    def _ask_for_room(self) -> None:
        """Wake up for writing where the kernel has not taken everything."""
        for channel in self._channels:
            key = self._selector.get_key(channel)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog_bytes else 0)
            if key.events != events:
                self._selector.modify(channel, events, key.data)

    def _time_left(self) -> float | None:
        if not self._timers:
            return None
        return min(LONGEST_SLEEP_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _run_timers(self) -> None:
        while self._running and self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Close the loop's own descriptor; what was watched stays open."""
        self._selector.close()
