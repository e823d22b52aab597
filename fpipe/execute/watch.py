"""The watch: notices that a rank has failed, ended or fallen silent, and wakes those who wait.

Every rank beats: a thread writes a counter to the group's store twice a second and looks at the
counter of the next rank. A rank whose counter stands still for the timeout is silent. Faults are
written to the store, the first one counts, and a fault that breaks connections rings the bell,
which ends every wait. A rank that compiles, or whose program does something else, still beats.

A store whose host has stopped answers nobody, and keeps whoever asks it. So only that thread asks
the store; a step tells it what it wants and waits for as long as it likes. A second thread does
nothing but see that the first gets on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

from torch.distributed import DistNetworkError

from fpipe.execute.fault import Fault

BEAT = 0.5
"""Seconds between two beats."""

GONE = ""
"""Stands in place of a beat when a pipeline has ended; the rank's other pipelines go on beating."""

DEAD = 3.0
"""Seconds without a beat that make a rank dead once a connection has broken."""


class Store(Protocol):
    """The methods of `torch.distributed.Store` that the watch uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Silence(NamedTuple):
    """Since when a rank has not been heard of; one that was before is suspected first.

    Attributes:
        has_beaten: whether it was, and has not ended the pipeline since.
        seconds: since it was last seen to beat, or since it was first looked for.
    """

    has_beaten: bool
    seconds: float


class Watch:
    """Watches the ranks of a group while a pipeline lives.

    Args:
        store: where ranks leave notes for each other.
        members: a name for each rank of the group.
        rank: this rank.
        timeout: seconds of silence that make a rank faulty.
        ring: breaks the group, so that every operation that waits ends.
        lost: under which pipelines over the same group tell each other why its connections broke.
        beside: the same for other groups that take the step together with this one, or None.
        hosts: whether this process may host the store.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[str],
        rank: int,
        timeout: float,
        ring: Callable[[], None],
        lost: str = "lost",
        hosts: bool = False,
        beside: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"beat/{member}" for member in members]
        self._timeout = timeout
        self._ring = ring
        self._lost_topic = lost
        self._beside = beside
        self._beats = 0
        self._missed = 0
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        self._lock = threading.Lock()
        self._topic: str | None = None
        self._own: Fault | None = None
        self._suspicion: str | None = None
        self._missing = -inf
        self._lost: Fault | None = None
        self._known = threading.Event()
        self._hosts = hosts
        self._heard = threading.Event()
        self._wake = threading.Event()
        self.fault: Fault | None = None
        """The first fault of this step, once it is known."""
        stop = threading.Event()
        # Weak references, so that a forgotten pipeline ends its threads.
        alive = weakref.ref(self)
        leave = partial(store.set, self._keys[rank], GONE)
        threads = [
            threading.Thread(
                name="fpipe beat",
                target=_beat_for_ever,
                args=(alive, stop, self._wake, leave),
                daemon=True,
            ),
            threading.Thread(
                name="fpipe guard", target=_guard_for_ever, args=(alive, stop), daemon=True
            ),
        ]
        self.close = weakref.finalize(self, _end, stop, self._wake, threads)
        """End the threads; done at the latest when the process ends."""
        for thread in threads:
            thread.start()

    def has_fault(self) -> bool:
        """Whether this step is to be given up."""
        return self.fault is not None

    def begin(self, topic: str) -> None:
        """A step begins, whose faults are written under `topic`."""
        with self._lock:
            self._topic, self._own, self._suspicion, self._missing = topic, None, None, -inf
            if self.fault is None or not self.fault.breaks:
                self.fault = None
                self._known.clear()

    def end(self) -> None:
        """The step has ended; until the next one nothing rings."""
        with self._lock:
            self._topic = None

    def report(self, fault: Fault) -> Fault:
        """Tell all ranks of a fault of this step; returns the one that was reported first."""
        self._own = fault
        return self.await_fault() or fault

    def await_fault(self) -> Fault | None:
        """The fault that a rank has reported; None if the store does not tell."""
        self._wake.set()
        self._known.wait(DEAD)
        return self.fault

    def linger(self) -> None:
        """Wait until the other ranks know of the fault too, some seconds at most.

        Where this process hosts the store and ends now, they would know no more than that.
        """
        if self._hosts:
            self._wake.set()
            self._heard.wait(DEAD)

    def hears_of_fault(self) -> bool:
        """Whether a rank has reported a fault of this step; asks the store, if need be."""
        return self.await_fault() is not None

    def gives_up(self, seconds: float) -> bool:
        """Whether who has waited so long for a rank to come is to wait no longer; asked on and on.

        For as long as it is asked about a long wait, a rank without a beat is suspected.
        """
        if seconds > DEAD:
            if self._suspects() is None:
                self._wake.set()
            self._missing = time.monotonic()
        return self.has_fault()

    def _suspects(self) -> str | None:
        """Why a rank without a beat is taken for dead before the timeout; None if it is not."""
        if self._suspicion is None and time.monotonic() - self._missing < BEAT:
            return "it did not come to connect"
        return self._suspicion

    def culprit(self, peer: int | None, text: str) -> Fault:
        """Find who is to blame for a lost connection to `peer`; takes some seconds at most.

        The peer may only have closed its connections because of a third rank, which then has
        reported a fault or has stopped beating.
        """
        text = text.partition("This is typically caused")[0].rstrip(" .")  # gloo's advice
        self._suspicion = text
        self._wake.set()
        if self._known.wait(2 * DEAD) and self.fault is not None:
            return self.fault
        where = "between ranks" if peer is None else f"to rank {peer}"
        what = f"the connection {where} broke"
        # Those of gloo, on the rank whose wait ended first, and on others; a cable has another.
        if any(words in text.lower() for words in ("timed out waiting", "application timeout")):
            what = (
                "a rank that lives is in something else, such as a collective or a barrier that it "
                "alone has called, a data loader or a checkpoint; or another thread uses the "
                "group, such as that of dcp.async_save: the ranks waited for each other for the "
                "timeout of their process group"
            )
        return self.report(Fault(peer, f"{what}: {text}", breaks=True))

    def beat(self) -> float:
        """One round: beat, look at the next rank, look for a fault; returns when to come again."""
        topic = self._topic
        fault = self._lost
        if fault is None:
            try:
                fault = self._round(topic)
            except RuntimeError as error:
                fault = _store_lost(error)
                # It does not come back, and torch logs a page for each further question.
                self._lost = fault if isinstance(error, DistNetworkError) else None
        self._missed = 0
        if topic is not None and fault is not None:
            self._note(topic, fault)
            if fault.breaks and topic == self._topic:
                self._ring()
        hurries = self._suspects() is not None or (fault is not None and fault.breaks)
        return BEAT / 5 if hurries else BEAT

    def _round(self, topic: str | None) -> Fault | None:
        """Ask the store all there is to ask; returns the fault of the step, if there is one."""
        self._beats += 1
        self._store.set(self._keys[self._rank], str(self._beats))
        following = (self._rank + 1) % len(self._keys)
        silence = self._silence(following)
        if topic is None:
            return None
        # A rank that has never beaten may be a long time on its way to its pipeline.
        silent = silence.has_beaten and silence.seconds > self._timeout
        fault = self._look(topic)
        if fault is None and silent:
            fault = self._tell(topic, _silent(following, silence.seconds))
        if fault is not None and fault.breaks:
            self._hear(topic, fault)
        return fault

    def _hear(self, topic: str, fault: Fault) -> None:
        """Say that this rank knows of a fault, and see which others do."""
        if (beside := self._beside()) is not None:
            elsewhere = replace(fault, text=f"in another row of the mesh, {fault.text}")
            self._store.compare_set(beside, "", elsewhere.dump())
        self._store.set(f"{topic}/heard/{self._rank}", "")
        others = [
            f"{topic}/heard/{rank}"
            for rank in range(len(self._keys))
            if rank not in (self._rank, fault.rank) and self._silence(rank).seconds < DEAD
        ]
        if not others or self._store.check(others):
            self._heard.set()

    def _look(self, topic: str) -> Fault | None:
        """The fault of a step, if there is one; who has ended is only asked when a wait broke."""
        if self.fault is not None:
            return self.fault
        if self._own is not None:
            return self._tell(topic, self._own)
        if self._store.check([topic]):
            return Fault.load(self._store.get(topic))
        if (suspicion := self._suspects()) is not None:
            for place in (self._lost_topic, self._beside()):
                if place is not None and self._store.check([place]):
                    return self._tell(topic, Fault.load(self._store.get(place)))
            silences = [(self._silence(rank), rank) for rank in range(len(self._keys))]
            ended = [(silence, rank) for silence, rank in silences if silence.seconds > DEAD]
            if ended:
                return self._tell(topic, _ended(max(ended)[1], suspicion))
        return None

    def _tell(self, topic: str, fault: Fault) -> Fault:
        """Write a fault down, unless there is one; returns the one that stands there."""
        first = Fault.load(self._store.compare_set(topic, "", fault.dump()))
        if first.breaks:
            self._store.set(self._lost_topic, first.dump())
        return first

    def _note(self, topic: str, fault: Fault) -> None:
        """Remember a fault, unless its step is over: the threads may learn of it too late."""
        with self._lock:
            if topic == self._topic and self.fault is None:
                self.fault = fault
                self._known.set()

    def guard(self) -> None:
        """See that the beating thread gets on."""
        # Rounds are counted, not seconds: a process that was stopped has missed none.
        self._missed += 1
        seconds, topic = self._missed * BEAT, self._topic
        if seconds > self._timeout and topic is not None and self.fault is None:
            self._note(topic, _store_silent(self._rank, seconds))
            self._ring()

    def _silence(self, rank: int) -> Silence:
        """How long another rank has not been heard of."""
        if rank == self._rank:
            return Silence(True, 0.0)
        now = time.monotonic()
        key = self._keys[rank]
        value = self._store.get(key) if self._store.check([key]) else None
        if rank not in self._seen or self._seen[rank][0] != value:
            self._seen[rank] = (value, now)
        return Silence(value not in (None, GONE.encode()), now - self._seen[rank][1])

    @property
    def has_store(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._lost is None


def _silent(rank: int, seconds: float) -> Fault:
    return Fault(
        rank, f"rank {rank} has not responded for {seconds:.1f} s: it has stopped", breaks=True
    )


def _ended(rank: int, text: str) -> Fault:
    return Fault(
        rank, f"rank {rank} has ended or cannot be reached (connection error: {text})", breaks=True
    )


def _store_lost(error: Exception) -> Fault:
    return Fault(
        0,
        f"the store of the process group is lost, so the process that hosts it (the launcher, or "
        f"rank 0) has ended: {error}",
        breaks=True,
    )


def _store_silent(rank: int, seconds: float) -> Fault:
    return Fault(
        rank,
        f"the store of the process group has not answered rank {rank} for {seconds:.1f} s: the "
        "process that hosts it (the launcher, or rank 0) has stopped",
        breaks=True,
    )


def _beat_for_ever(
    watch: weakref.ref[Watch],
    stop: threading.Event,
    wake: threading.Event,
    leave: Callable[[], None],
) -> None:
    pause = 0.0
    while True:
        wake.wait(pause)
        wake.clear()
        alive = watch()
        if stop.is_set() or alive is None:
            break
        pause = alive.beat()
        del alive
    # At the end of the process the store may be gone, and nobody waits for this rank any more.
    if threading.main_thread().is_alive() and (alive is None or alive.has_store):
        with suppress(RuntimeError):
            leave()


def _guard_for_ever(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        alive = watch()
        if alive is None:
            return
        alive.guard()
        del alive


def _end(stop: threading.Event, wake: threading.Event, threads: Sequence[threading.Thread]) -> None:
    """End the threads, and wait for them: one in the midst of a call would not survive the end of
    the interpreter. One that a lost store keeps is not waited for."""
    stop.set()
    wake.set()
    for thread in threads:
        begun = thread.ident is not None  # an interrupt may have come before
        if begun and thread is not threading.current_thread():
            thread.join(1.0)
