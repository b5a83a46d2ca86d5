"""Sender: numbers, spools and sends recorded steps in the background until acknowledged."""

import contextlib
import os
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.client.backoff import Backoff
from understudy.client.losses import Losses
from understudy.client.receipts import Receipts
from understudy.client.session import RecordingWarning, Session, Sessions
from understudy.client.spool import Spool, UnackedFrames
from understudy.client.spool_folder import SessionSpool, SpooledFrame, read_game
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import ConfigError, Corrupt, LinkFailed, SpecError
from understudy.core.names import PlayerName
from understudy.experience.builder import Block, encode_block
from understudy.experience.frame import (
    MAX_FRAMES_PER_SEND,
    CloseReport,
    Frame,
    close_frame,
    drop_frame,
)
from understudy.experience.game import GameSpec
from understudy.ports import Ack, Link

_MAX_BATCH_BYTES = 4 * 1024 * 1024
_MEMORY_BYTES = 8 * 1024 * 1024
_REPORT_EVERY_S = 10.0
"""Skipped steps are reported with each send, or this often without one; the response updates the
recording rate."""
_MAX_FAILURES = 3
"""After this many failed sends, `send_unsent_frames` leaves the rest in the spool."""
_CHECK_BYTES = 1024 * 1024
"""The spool's cap is checked each time this much, or a 32nd of the cap, was spooled."""
_WRITE_BYTES = 256 * 1024
"""Encoded frames are written to the spool together, up to this much at once."""
_BUSY_S = 0.05
"""How long to wait for a call on a session. It takes longer only if a signal interrupted it, or if
many threads compete."""
_CHUNK_S = 0.0005
"""Each open session adds this to the linger, so that at most 2,000 chunks a second are encoded."""


@dataclass(slots=True)
class SenderCounts:
    """Counters of a sender."""

    spooled_steps: int = 0
    acked_steps: int = 0
    refused_steps: int = 0
    dropped_steps: int = 0
    sent_frames: int = 0
    acked_frames: int = 0
    refused_frames: int = 0
    failed_sends: int = 0
    adopted_sessions: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a Game; steps are closed transitions."""

    recorded_steps: int
    skipped_steps: int
    """Played but not recorded, because the platform requested only a share of the episodes."""
    recording_rate: float
    """The probability that the next episode is recorded."""
    spooled_steps: int
    acked_steps: int
    refused_steps: int
    dropped_steps: int
    sent_frames: int
    acked_frames: int
    refused_frames: int
    failed_sends: int
    adopted_sessions: int
    bad_inputs: int
    last_bad_input: str
    """The last invalid input of the game, as `code: detail`; empty while there was none."""
    ignored_calls: int
    open_episodes: int
    last_error: str
    bot: str
    """The bot that plays new episodes, such as `my-game/7`; empty while there is no bot."""
    refused_bots: int
    last_bot_error: str
    """Why the newest bot was rejected or could not be fetched; the last good one stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """When recorded steps are sent, and how failed sends are retried."""

    linger_s: float = 1.0
    """How long a recorded step waits, at most, for others to be sent with it. The wait is longer,
    half a millisecond per session, if that is more."""
    session_idle_s: float = 60.0
    """A session is closed once its player has had no episode for this long."""
    adopt_every_s: float = 30.0
    """How often to look for unsent steps of other processes that were killed."""
    retry_first_s: float = 0.5
    """The bound of the first wait before a retry; waits are random between 0 and the bound."""
    retry_cap_s: float = 30.0
    """The bound doubles with each failure, up to this."""

    def __post_init__(self) -> None:
        times = ("linger_s", "session_idle_s", "adopt_every_s", "retry_first_s", "retry_cap_s")
        for name in times:
            time_s = getattr(self, name)
            if not isinstance(time_s, int | float) or not time_s > 0:
                raise ConfigError(f"{name} is {time_s!r}; use seconds above 0, such as 1.0")


class Sender:
    """Moves blocks from a client's sessions to its spool, and frames from there to the platform."""

    def __init__(
        self,
        link: Link,
        sessions: Sessions,
        spool: Spool,
        *,
        spec: GameSpec,
        clock: Clock,
        config: SenderConfig | None = None,
        rng: random.Random | None = None,
        receipts: str | os.PathLike[str] | None = None,
    ) -> None:
        """`receipts`: a file that gets a line for every acknowledged frame."""
        self._link = link
        self._sessions = sessions
        self._spool = spool
        self._spec = spec
        self._clock = clock
        self._config = SenderConfig() if config is None else config
        self._backoff = Backoff(
            clock,
            random.Random() if rng is None else rng,
            first_s=self._config.retry_first_s,
            cap_s=self._config.retry_cap_s,
        )
        self._adopted_backoff = Backoff(
            clock,
            random.Random() if rng is None else rng,
            first_s=self._config.retry_first_s,
            cap_s=self._config.retry_cap_s,
        )
        """Of frames that another process spooled, which the platform may put off for long."""
        self._work = threading.RLock()
        self._settled = threading.Condition(self._work)
        self._never = threading.Event()
        self.wake = sessions.handoff.filled
        """Set when there is something to spool."""
        self._can_send = threading.Event()
        """Set when there is something to send."""
        self._is_released = False
        self.counts = SenderCounts()
        self._open: dict[uuid.UUID, SessionSpool] = {}
        self._ending: dict[uuid.UUID, SessionSpool] = {}
        """Those of `_open` that have ended and are not closed yet."""
        self._fresh: list[SpooledFrame] = []
        """Frames that were added to the spool since its last write."""
        self._fresh_bytes = 0
        self._waiting = UnackedFrames(memory_bytes=_MEMORY_BYTES)
        self._unchecked_bytes = 0
        self._losses = Losses()
        self._recording_rate = sessions.recording_rate
        self._queues = (sessions.handoff.due, sessions.recording_rate.due)
        self._report_at_s = clock.monotonic() + _REPORT_EVERY_S
        self._registered: set[str] = set()
        self._warned: set[str] = set()
        self._receipts = None if receipts is None else Receipts(receipts, warn=self.warn)
        self._adopt_at_s = clock.monotonic()
        self._hurry = False

    # --- One round --------------------------------------------------------------------------------

    def step(self) -> float:
        """Spool recorded steps and send one batch; returns seconds until the next call is due."""
        self.spool()
        send_wait_s = self.send()
        with self._work:
            return send_wait_s if self._is_released else min(send_wait_s, self._spool_wait_s())

    def spool(self) -> float:
        """Spool recorded steps; returns seconds until the next call is due."""
        with self._work:
            if self._is_released:
                return self._config.adopt_every_s
            self._adopt()
            self._collect()
            if self._waiting or self._recording_rate.unreported_steps:
                self._can_send.set()
            return self._spool_wait_s()

    def send(self) -> float:
        """Send one batch of spooled steps; returns seconds until the next call is due."""
        with self._work:
            if self._is_released:
                return self._config.adopt_every_s
            batch = self._batch()
        if batch or (
            self._recording_rate.unreported_steps
            and self._clock.monotonic() >= self._report_at_s
            and self._backoff.remaining_s <= 0
        ):
            # Without the lock: while the platform does not respond, steps are still spooled.
            acks, error = self._send(batch)
            with self._work:
                if not self._is_released:
                    self._settle(batch, acks, error)
        with self._work:
            return self._send_wait_s()

    def run_spooling(self, stop: threading.Event) -> None:
        """Repeat `spool` until `stop` is set; errors do not end the thread."""
        self._repeat(self.spool, self.wake, stop)

    def run_sending(self, stop: threading.Event) -> None:
        """Repeat `send` until `stop` is set; errors do not end the thread."""
        self._repeat(self.send, self._can_send, stop)

    def _repeat(
        self, step: Callable[[], float], wake: threading.Event, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            wake.clear()
            try:
                wait_s = step()
            except Exception as error:
                self.warn("sender", f"sending recorded steps failed and is retried: {error!r}")
                wait_s = 1.0
            if wait_s > 0:
                self._clock.wait(wake, wait_s)

    def wake_all(self) -> None:
        """Wake both threads, such as to end them."""
        self.wake.set()
        self._can_send.set()

    def _spool_wait_s(self) -> float:
        now_s = self._clock.monotonic()
        due_s = [0.0 if self._spool.can_adopt_more else self._adopt_at_s - now_s]
        if self._sessions.n_live:
            # A step that closes right after this check is due in `linger_s` at the earliest.
            oldest_s = min(queue[0][1] if queue else now_s for queue in self._queues)
            due_s.append(oldest_s + self._linger_s - now_s)
        return max(0.0, min(due_s))

    def _send_wait_s(self) -> float:
        due_s = [self._config.adopt_every_s]
        if self._waiting or self._fresh:
            first = next(iter(self._waiting), None)
            is_adopted = not self._fresh and first is not None and first.spool.is_adopted
            put_off_s = self._adopted_backoff.remaining_s if is_adopted else 0.0
            due_s.append(max(put_off_s, self._backoff.remaining_s))
        if self._recording_rate.unreported_steps:
            report_s = self._report_at_s - self._clock.monotonic()
            due_s.append(max(report_s, self._backoff.remaining_s))
        return max(0.0, min(due_s))

    # --- From the game into the spool -------------------------------------------------------------

    def _adopt(self) -> None:
        now_s = self._clock.monotonic()
        if now_s < self._adopt_at_s and not self._spool.can_adopt_more:
            return
        self._adopt_at_s = now_s + self._config.adopt_every_s
        for spool, entries in self._spool.adopt():
            self.counts.adopted_sessions += 1
            self._open[spool.session] = spool
            self._ending[spool.session] = spool
            self._waiting.adopt(entries)
            if spool.lost_numbers:
                self._lose(spool, spool.lost_numbers, spool.lost_steps)
        self._report_lost()
        for spool in list(self._ending.values()):
            self._close_if_finished(spool)
        for folder in self._spool.damaged:
            self.warn(
                f"damaged {folder}",
                f"the file sessions in {folder} was damaged, so all frames there are sent again; "
                "the platform discards those that it has",
            )
        for folder, reason in self._spool.unreadable.items():
            self.warn(
                f"unreadable {folder}",
                f"unsent steps of an earlier start stay in {folder}, because this version cannot "
                f"read them: {reason}; start the version that recorded them, or delete the folder",
            )

    def _collect(self) -> bool:
        """Spool the steps that are due; returns whether no session was busy."""
        is_complete = True
        self._sessions.release_abandoned()
        now_s = self._clock.monotonic()
        for queue in self._queues:
            for _ in range(len(queue)):
                if not self._hurry and queue[0][1] > now_s - self._linger_s:
                    break
                session, _ = queue.popleft()
                if not session.submit_due(_BUSY_S):
                    is_complete = False
                    queue.append((session, now_s))
                self._drain()
        self._sessions.retire(idle_s=self._config.session_idle_s)
        self._end_sessions()
        self._write()
        return is_complete

    @property
    def _linger_s(self) -> float:
        return max(self._config.linger_s, self._sessions.n_live * _CHUNK_S)

    def _drain(self) -> None:
        while (item := self._sessions.handoff.take()) is not None:
            session = item.owner
            spool = self._open.get(session.id)
            if spool is None:
                spool = self._spool.create(session.id, player=session.player, spec=self._spec)
                self._open[session.id] = spool
            if item.lost_blocks:
                self._lose(spool, [spool.skip(item.lost_steps)], item.lost_steps)
            if item.block is not None:
                self._add_block(spool, item.block)
            self._report_lost()
            if self._fresh_bytes >= _WRITE_BYTES:
                self._write()

    def _add_block(self, spool: SessionSpool, block: Block) -> None:
        left_steps = block.n_steps
        try:
            for encoded in encode_block(block, chunk_no=spool.next_no, first_step=spool.n_steps):
                if encoded.frame is None:
                    self._lose(spool, [spool.skip(encoded.n_steps)], encoded.n_steps)
                else:
                    self._add(spool, encoded.frame, encoded.n_steps)
                left_steps -= encoded.n_steps
        except Exception as error:
            self.counts.last_error = repr(error)[:300]
            self.warn("sender", f"recorded steps could not be saved and are dropped: {error!r}")
        finally:
            # The block has no other owner: steps that are not spooled by now are lost and must be
            # reported.
            if left_steps:
                self._lose(spool, [spool.skip(left_steps)], left_steps)

    def _add(self, spool: SessionSpool, frame: Frame, n_steps: int) -> None:
        entry = spool.add(frame, n_steps)
        self._fresh.append(entry)
        self._fresh_bytes += entry.size_bytes

    def _write(self) -> None:
        self.counts.spooled_steps += self._spool.write()
        for entry in self._fresh:
            self._waiting.add(entry)
        self._unchecked_bytes += self._fresh_bytes
        self._fresh = []
        self._fresh_bytes = 0
        if self._spool.error:
            self.warn(
                "disk",
                f"recorded steps wait in memory, because they cannot be saved in "
                f"{self._spool.folder}: {self._spool.error}. Those that are not sent before the "
                "game ends are lost",
            )
        self._keep_cap()

    def _end_sessions(self) -> None:
        ended = self._sessions.ended
        # All blocks of these sessions are in the handoff, so after `_drain` they are in the spool.
        n_ended = len(ended)
        self._drain()
        self._report_lost()  # also what an interrupted `_drain` lost
        for _ in range(n_ended):
            spool = self._open.get(ended.popleft().id)
            if spool is not None:
                spool.has_ended = True
                self._ending[spool.session] = spool
                self._close_if_finished(spool)

    def _close_if_finished(self, spool: SessionSpool) -> None:
        if not (spool.has_ended and spool.is_idle) or spool.session not in self._open:
            return
        if not spool.is_closing and spool.next_no:
            # The close frame is the last: until now, a drop report may have needed a number.
            report = CloseReport(spool.next_no, spool.n_steps)
            self._add(spool, close_frame(spool.session, spool.next_no, report), 0)
            spool.is_closing = True
        else:
            del self._open[spool.session]
            del self._ending[spool.session]
            self._spool.remove(spool)

    # --- Dropping and reporting -------------------------------------------------------------------

    def _keep_cap(self) -> None:
        if self._unchecked_bytes < min(_CHECK_BYTES, self._spool.cap_bytes // 32):
            return
        self._unchecked_bytes = 0
        cap = self._spool.cap_bytes
        memory = self._spool.memory_bytes
        if self._spool.size_bytes <= cap and memory <= _MEMORY_BYTES:
            return
        self.counts.spooled_steps += self._spool.tidy()
        size = self._spool.size_bytes
        dropped = self._waiting.drop_oldest(
            size - cap * 7 // 8 if size > cap else 0, memory - _MEMORY_BYTES
        )
        for entry in dropped:
            self._lose(entry.spool, [entry.chunk_no], entry.n_steps)
        self._report_lost()
        self.counts.spooled_steps += self._spool.tidy()

    def _lose(self, spool: SessionSpool, numbers: Sequence[int], n_steps: int) -> None:
        self._losses.add(spool.session, numbers, n_steps)
        self.counts.dropped_steps += n_steps
        self.warn(
            "dropped",
            "recorded steps were dropped before they could be sent; game.stats().dropped_steps "
            "counts them",
        )

    def _report_lost(self) -> None:
        for session, report in self._losses.reports():
            spool = self._open[session]
            if not (spool.is_muted or spool.is_closing):
                self._add(spool, drop_frame(session, spool.next_no, report), 0)

    # --- From the spool through the link ----------------------------------------------------------

    def _batch(self) -> list[tuple[SpooledFrame, Frame]]:
        self._write()
        if self._backoff.remaining_s > 0:
            return []
        batch: list[tuple[SpooledFrame, Frame]] = []
        left_bytes = min(_MAX_BATCH_BYTES, self._spool.cap_bytes // 4)
        for entry in self._waiting:
            if entry.spool.is_adopted and self._adopted_backoff.remaining_s > 0:
                break  # those of this process come first
            left_bytes -= entry.size_bytes
            if batch and (left_bytes < 0 or len(batch) == MAX_FRAMES_PER_SEND):
                break
            frame = entry.spool.read(entry)
            if frame is None:
                self._waiting.finish(entry, arrived=False)
                self._lose(entry.spool, [entry.chunk_no], entry.n_steps)
                continue
            entry.tried = True
            batch.append((entry, frame))
        self._report_lost()
        return batch

    def _send(self, batch: Sequence[tuple[SpooledFrame, Frame]]) -> tuple[Sequence[Ack], str]:
        players: dict[uuid.UUID, PlayerName] = {
            entry.spool.session: entry.spool.player for entry, _ in batch
        }
        with self._work:
            skipped = self._recording_rate.unreported_steps
            self._recording_rate.reported_steps += skipped
        try:
            for spec in {entry.spool.spec.schema: entry.spool.spec for entry, _ in batch}.values():
                if spec.schema not in self._registered:
                    self._link.register(spec)
                    self._registered.add(spec.schema)
            acks = self._link.send([frame for _, frame in batch], players, skipped_steps=skipped)
            self._recording_rate.value = self._link.recording_rate
            self._report_at_s = self._clock.monotonic() + _REPORT_EVERY_S
            if len(acks) == len(batch):
                return acks, ""
            error = f"the platform sent {len(acks)} acknowledgements for {len(batch)} frames"
            self._warn_unsent("link", error)
            return (), error
        except LinkFailed as failed:
            # The next response may come from another or a new gateway, which does not know the
            # game.
            self._registered.clear()
            self._unreport(skipped)
            self._warn_unsent(failed.code, str(failed))
            ack = Ack(False, retry_after_s=failed.retry_after_s, error=str(failed))
            return [ack] * len(batch), str(failed)
        except Exception as bug:
            # The request may have succeeded nevertheless; the platform discards duplicates.
            self._unreport(skipped)
            error = repr(bug)[:300]
            self._warn_unsent("link", error)
            return (), error

    def _warn_unsent(self, topic: str, reason: str) -> None:
        if not self._is_released:
            where = "in memory" if self._spool.error else "saved on this machine"
            self.warn(topic, f"recorded steps are {where} and will be sent later: {reason}")

    def _unreport(self, skipped_steps: int) -> None:
        with self._work:
            self._recording_rate.reported_steps -= skipped_steps

    def _settle(
        self, batch: Sequence[tuple[SpooledFrame, Frame]], acks: Sequence[Ack], error: str
    ) -> None:
        self.counts.sent_frames += len(batch)
        again = len(batch) - len(acks)
        has_failed = bool(error)
        put_off: list[SessionSpool] = []
        put_off_s = 0.0
        retry_after_s = 0.0
        if self._receipts is not None:
            acked = [frame for (_, frame), ack in zip(batch, acks, strict=False) if ack.accepted]
            self._receipts.add(acked)
        for (entry, _), ack in zip(batch, acks, strict=False):
            if entry.is_done:
                continue  # two threads called pump at once, and the other got its response first
            if ack.accepted:
                self.counts.acked_frames += 1
                self.counts.acked_steps += entry.n_steps
                self._waiting.finish(entry, arrived=True)
            elif ack.refused is not None:
                self._refuse(entry, ack.refused)
            elif entry.spool.is_adopted and not has_failed:
                # Put off, such as for its age: the frames of other sessions need not wait for it.
                put_off.append(entry.spool)
                put_off_s = max(put_off_s, ack.retry_after_s)
                error = ack.error or error
            else:
                again += 1
                retry_after_s = max(retry_after_s, ack.retry_after_s)
                error = ack.error or error
        self._report_lost()
        for spool in {entry.spool for entry, _ in batch}:
            self._close_if_finished(spool)
        self.counts.spooled_steps += self._spool.tidy()
        if self._spool.can_adopt_more:
            self.wake.set()
        if put_off:
            self._waiting.put_off(set(put_off))
            self._adopted_backoff.failed(wholly=len(put_off) == len(batch), retry_after_s=put_off_s)
        if again or put_off or error:
            self.counts.failed_sends += 1
            self.counts.last_error = error or self.counts.last_error
        if again or has_failed:
            self._backoff.failed(wholly=again == len(batch), retry_after_s=retry_after_s)
        else:
            self._backoff.succeeded()
        self._settled.notify_all()

    def _refuse(self, entry: SpooledFrame, reason: str) -> None:
        self.counts.refused_frames += 1
        self.counts.refused_steps += entry.n_steps
        self.counts.last_error = reason
        self.warn("refused", f"the platform rejected recorded steps permanently: {reason}")
        self._waiting.finish(entry, arrived=False)
        if entry.is_data:
            self._losses.add(entry.spool.session, [entry.chunk_no], entry.n_steps)
        else:
            entry.spool.is_muted = True

    # --- Flushing and closing ---------------------------------------------------------------------

    def flush(self, timeout_s: float, *, pumps: bool = False) -> bool:
        """Wait until all recorded steps are acknowledged, rejected or dropped; False on timeout.

        Does not wait for adopted sessions. With `pumps`, `step` is called here, because no thread
        runs.
        """
        with self._work:
            self._hurry = True
            try:
                is_complete = self._collect()
            finally:
                self._hurry = False
            waiting = [entry for entry in self._waiting if not entry.spool.is_adopted]
        wait_for = self._pump_until if pumps else self._wait_for
        return wait_for(lambda: all(entry.is_done for entry in waiting), timeout_s) and is_complete

    def finish(self, sessions: Iterable[Session], timeout_s: float, *, pumps: bool = False) -> bool:
        """End, spool, send and close these sessions until the timeout; the rest stays spooled.

        Waits for adopted sessions only while the platform accepts their frames. Returns whether all
        others are closed. `pumps` as in `flush`.
        """
        busy = []
        with self._work:
            for session in sessions:
                if not self._sessions.end(session, timeout_s=_BUSY_S):
                    busy.append(session)
                self._drain()
            self._end_sessions()
            self._write()
        # A signal handler interrupted a call on them: every other session is spooled by now.
        for session in busy:
            self._sessions.end(session)
        with self._work:
            self._end_sessions()
            self._write()
            waiting = set(self._ending)
            own = {session for session in waiting if not self._ending[session].is_adopted}

        def is_done() -> bool:
            left = waiting & self._ending.keys()
            is_put_off = self._backoff.remaining_s > 0 or self._adopted_backoff.remaining_s > 0
            return not left or (is_put_off and left.isdisjoint(own))

        wait_for = self._pump_until if pumps else self._wait_for
        wait_for(is_done, timeout_s)
        with self._work:
            return own.isdisjoint(self._ending)

    @property
    def is_clear(self) -> bool:
        """Whether every ended session is closed and removed."""
        return not self._ending

    def abandon(self) -> None:
        """Close the parent's files in a forked child; replaces locks, since they may be held."""
        self._work = threading.RLock()
        self._settled = threading.Condition(self._work)
        self._spool.abandon()
        self._clear()
        self._is_released = True

    def release(self) -> int:
        """Release the spool, so that another process can adopt it; returns how many steps are lost.

        A step is lost if it was neither acknowledged nor saved, such as on a full disk. Responses
        that arrive later are ignored: the next start sends those frames again.
        """
        with self._work:
            self._is_released = True
            self._write()
            lost_steps = self._spool.close()
            self.counts.dropped_steps += lost_steps
            self._clear()
            return lost_steps

    def _clear(self) -> None:
        self._open.clear()
        self._ending.clear()
        self._waiting.clear()

    def _wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = self._clock.monotonic() + timeout_s
        with self._work:
            while not done():
                remaining_s = deadline_s - self._clock.monotonic()
                if remaining_s <= 0:
                    return False
                self.wake.set()
                self._settled.wait(min(remaining_s, 0.05))
        return True

    def _pump_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        began_s = self._clock.monotonic()
        waited_s = 0.0
        while not done():
            # The waits count too, so that this ends even if the clock stands still.
            remaining_s = timeout_s - max(waited_s, self._clock.monotonic() - began_s)
            if remaining_s <= 0:
                return False
            due_s = self.step()
            if due_s > 0 and not done():
                pause_s = min(max(due_s, 0.01), remaining_s)
                self._clock.wait(self._never, pause_s)
                waited_s += pause_s
        return True

    def warn(self, topic: str, text: str) -> None:
        """Warn once for each topic; never raises."""
        if topic not in self._warned:
            self._warned.add(topic)
            # Warnings raised as errors (-W error) must not end a background thread.
            with contextlib.suppress(RecordingWarning):
                warnings.warn(text, RecordingWarning, stacklevel=2)


def send_unsent_frames(
    folder: Path,
    link_to: Callable[[GameSpec], Link],
    *,
    timeout_s: float = 60.0,
    clock: Clock | None = None,
) -> int:
    """Send what killed games left in a spool folder; returns how many frames were acknowledged."""
    clock = clock or SystemClock()
    spec = _spec_in(folder)
    if spec is None:
        return 0
    link = link_to(spec)
    spool = Spool(folder)
    sender = Sender(
        link,
        Sessions(spec, kind="player", client="understudy-unsent-frames", clock=clock),
        spool,
        spec=spec,
        clock=clock,
    )
    deadline = clock.monotonic() + timeout_s
    try:
        wait_s = sender.step()
        while (
            (not sender.is_clear or spool.may_have_more)
            and clock.monotonic() < deadline
            and sender.counts.failed_sends < _MAX_FAILURES
        ):
            time.sleep(min(wait_s, 0.1))
            wait_s = sender.step()
    finally:
        sender.release()
        link.close()
    return sender.counts.acked_frames


def _spec_in(folder: Path) -> GameSpec | None:
    for path in sorted(folder.glob("*/spool.json")):
        with contextlib.suppress(Corrupt, SpecError):
            return read_game(path.parent).spec()
    return None
