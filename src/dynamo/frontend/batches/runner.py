"""The runner of batches: it takes lines from the journal to the frontend's own handlers, and keeps their answers.

One process of all that use a journal runs the batches: the one that holds the lock of its folder, which the system
frees when the process ends, however it ends. The others look every `POLL_S` seconds whether the lock is free.

A line is answered by the same handler as a client's request, behind the check of API keys: with the rights of the key
that made the batch, and its limits of tokens and answers, but not as one of its requests per minute. A line without an
answer in the journal is asked again by the next runner.

Lines are bounded twice. Those that are asked hold slots of all batches. One that waits to be asked again, perhaps for
hours until its model is back, holds none, so that other batches go on; but it is begun, as which it holds slots of its
own batch, so that no batch is read much further than it is answered.
"""

import asyncio
import collections
import contextlib
import fcntl
import functools
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.frontend.batches import journal, lines
from dynamo.runtime.http import exchange

POLL_S = 2.0
SWEEP_S = 600.0
MODEL_WAIT_S = 60.0  # for the workers of a model, after the start of a batch or of its runner
_CHUNK = 128  # lines that are read or written at once
_SLOT_BYTES = 128 * 2**10  # of a line; a longer one takes several slots
_logger = logging.getLogger(__name__)
Authorize = Callable[[str | None], Mapping[str, str]]


class LineResponse(NamedTuple):
    """The response to the request of a line."""

    status: int
    body: bytes


class LineExchange(exchange.Exchange):
    """An exchange without a connection: it keeps its response."""

    __slots__ = ("response",)

    def __init__(self, request: exchange.Request) -> None:
        super().__init__(request, exchange.NoConnection(), lambda: None)
        self.response: asyncio.Future[LineResponse] = asyncio.get_running_loop().create_future()

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: exchange.Headers = (),
    ) -> None:
        """Keep the response instead of sending it."""
        del content_type, headers
        if not self.is_closed:
            self._finish()
            self.response.set_result(LineResponse(status, body))


class LineSlots:
    """Slots for lines, of which a long one takes several."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = asyncio.Semaphore(num_slots)
        self._taking = asyncio.Lock()

    async def take(self, num_bytes: int) -> int:
        """Wait for the slots of a line of this length, and return how many they are."""
        num_slots, num_taken = min(self._num_slots, 1 + num_bytes // _SLOT_BYTES), 0
        try:
            async with self._taking:  # of two long lines one goes first
                while num_taken < num_slots:
                    await self._free.acquire()
                    num_taken += 1
        except asyncio.CancelledError:
            self.release(num_taken)
            raise
        return num_slots

    def release(self, num_slots: int, _task: object = None) -> None:
        """Give so many slots back."""
        for _ in range(num_slots):
            self._free.release()


class BatchRunner:
    """Runs the batches of one journal."""

    def __init__(
        self,
        batch_journal: journal.BatchJournal,
        clock: clocks.Clock,
        *,
        concurrency: int,
        max_body_bytes: int,
    ) -> None:
        """Ask `concurrency` lines of all batches at once."""
        self.journal = batch_journal
        self._clock = clock
        self._concurrency = concurrency
        self._slots = LineSlots(concurrency)
        self._max_body_bytes = max_body_bytes
        self._changed = asyncio.Event()
        self._stops: dict[str, asyncio.Event] = {}  # by batch: it is to be cancelled

    def wake(self) -> None:
        """Look at the journal now, because a batch has come or is to be cancelled."""
        self._changed.set()

    async def run(self, handler: exchange.Handler, authorize: Authorize) -> None:
        """Answer lines until cancelled; `authorize` returns the headers of the API key of this name."""
        while True:
            try:
                with self._hold_lock() as is_held:
                    if is_held:
                        with self.journal.in_use():
                            await self._run_batches(handler, authorize)
            except (errors.Unavailable, OSError) as error:
                _logger.warning("batches wait: %s", error)
            await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(POLL_S):
                await self._changed.wait()
        self._changed.clear()

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[bool]:
        """Hold the lock of the journal, if no other process does."""
        if not self.journal.exists:
            yield False
            return
        lock = os.open(self.journal.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield _try_lock(lock)
        finally:
            os.close(lock)

    async def _run_batches(self, handler: exchange.Handler, authorize: Authorize) -> None:
        running: dict[str, asyncio.Task[None]] = {}
        swept_at = -SWEEP_S
        try:
            while True:
                if self._clock.now() - swept_at >= SWEEP_S:
                    await asyncio.to_thread(self.journal.sweep)
                    swept_at = self._clock.now()
                for entry in await asyncio.to_thread(self.journal.open_batches):
                    batch_id = entry.batch.id
                    if batch_id not in running:
                        self._stops[batch_id] = asyncio.Event()
                        asker = LineAsker(
                            handler, authorize(entry.key_name), self._clock, self._slots
                        )
                        running[batch_id] = asyncio.create_task(self._run_batch(entry.batch, asker))
                    if entry.batch.status == "cancelling":
                        self._stops[batch_id].set()
                await self._pause()
                for batch_id in [name for name, task in running.items() if task.done()]:
                    del running[batch_id], self._stops[batch_id]
        finally:
            await tasks.cancel(set(running.values()))

    async def _run_batch(self, batch: lines.Batch, asker: "LineAsker") -> None:
        """Take one batch to its end; after an error of the journal it is begun again."""
        try:
            if batch.status == "validating":
                batch = await asyncio.to_thread(
                    self.journal.check_input, batch.id, self._max_body_bytes
                )
            status: lines.Status = "completed"
            wrong: list[lines.LineError] = []
            if batch.status == "cancelling":
                status = "cancelled"
            elif batch.status == "in_progress":
                # those of an earlier runner
                asker.served_models |= await asyncio.to_thread(
                    self.journal.answered_models, batch.id
                )
                try:
                    status = await self._answer_in_time(batch, asker)
                except lines.InvalidLine as error:  # when it was checked, the limit was higher
                    status, wrong = "failed", [error.reason]
                except FileNotFoundError:
                    status, wrong = "failed", [lines.FILE_GONE]
            if batch.status not in lines.ENDED:
                batch = await asyncio.to_thread(self.journal.finish, batch.id, status, wrong)
            counts = batch.request_counts
            _logger.info(
                "%s is %s: %d lines, %d answered, %d failed",
                batch.id, batch.status, counts.total, counts.completed, counts.failed,
            )  # fmt: skip
        except (errors.Unavailable, OSError) as error:
            _logger.warning("%s waits: %s", batch.id, error)

    async def _answer_in_time(self, batch: lines.Batch, asker: "LineAsker") -> lines.Status:
        """Answer all lines that have no answer; return the status in which the batch ends."""
        stop = self._stops[batch.id]
        answering = asyncio.ensure_future(self._answer_lines(batch, asker))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            remaining_s = max(0.0, batch.expires_at - self._clock.wall())
            await asyncio.wait(
                (answering, stopping), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done():
                answering.result()
                return "completed"
        finally:
            await tasks.cancel({answering, stopping})
        if stop.is_set():
            return "cancelled"
        await asyncio.to_thread(self._expire_lines, batch)
        return "expired"

    def _expire_lines(self, batch: lines.Batch) -> None:
        remaining = self._requests(batch)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            expired = [
                journal.LineAnswer(
                    line.number,
                    True,
                    lines.expired_row(_line_id(batch, line.number), line.custom_id),
                )
                for line in chunk
            ]
            self.journal.add_answers(batch.id, expired)

    def _requests(self, batch: lines.Batch) -> Generator[lines.LineRequest]:
        """Yield the requests of lines that have no answer yet."""
        for number, row in self.journal.unanswered(batch, self._max_body_bytes):
            line = lines.parse(row, number, batch.endpoint, self._max_body_bytes)
            model, body = str(line.body.get("model")), lines.request_body(line)
            yield lines.LineRequest(number, line.custom_id, model, body)

    async def _answer_lines(self, batch: lines.Batch, asker: "LineAsker") -> None:
        remaining = self._requests(batch)
        writer = AnswerWriter(self.journal, batch.id, self._clock)
        begun = LineSlots(self._concurrency)

        async def answer(line: lines.LineRequest) -> None:
            line_id = _line_id(batch, line.number)
            response = await asker.ask(line_id, batch.endpoint, line)
            row = lines.answer_row(line_id, line.custom_id, response.status, response.body)
            await writer.add(journal.LineAnswer(line.number, response.status >= 400, row))

        try:
            async with asyncio.TaskGroup() as group:
                while chunk := await asyncio.to_thread(_read_chunk, remaining):
                    for line in chunk:
                        num_slots = await begun.take(len(line.body))
                        task = group.create_task(answer(line))
                        task.add_done_callback(functools.partial(begun.release, num_slots))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            with contextlib.suppress(ValueError):  # a thread still reads, and its end closes it
                remaining.close()


class LineAsker:
    """Asks the requests of one batch's lines, again where their answers do not stand."""

    def __init__(
        self,
        handler: exchange.Handler,
        headers: Mapping[str, str],
        clock: clocks.Clock,
        slots: LineSlots,
    ) -> None:
        """`slots` are those of all batches."""
        self._handler = handler
        self._slots = slots
        self._headers = {"content-type": "application/json", **headers}
        self._clock = clock
        self._waits_until = clock.now() + MODEL_WAIT_S
        self.served_models: set[str] = set()  # that have answered a line

    async def ask(self, line_id: str, url: str, line: lines.LineRequest) -> LineResponse:
        """Return the response to a line's request.

        A model that has answered comes back; one that has not may be a wrong name.
        """
        request = exchange.Request(
            method="POST",
            path=url,
            query="",
            headers={**self._headers, "x-request-id": line_id},
            body=line.body,
            peer="batch",
        )
        num_attempts = collections.Counter[int]()  # by status: what waited long may fail once
        while True:
            num_slots = await self._slots.take(len(line.body))
            try:
                response = await self._ask_once(request)
            finally:
                self._slots.release(num_slots)
            code = lines.error_code(response.status, response.body)
            status = lines.STATUS_BY_CODE.get(code, response.status)
            if code == lines.MODEL_MISSING:
                is_expected = line.model in self.served_models
                status = 503 if is_expected or self._clock.now() < self._waits_until else 404
            elif status == 200:
                self.served_models.add(line.model)
            num_attempts[status] += 1
            pause_s = lines.pause_s(status, num_attempts[status])
            if pause_s is None:
                return response
            await self._clock.sleep(pause_s)

    async def _ask_once(self, request: exchange.Request) -> LineResponse:
        line_exchange = LineExchange(request)
        try:
            handling = self._handler(line_exchange)
            if handling is not None:
                await handling
            return await line_exchange.response
        except Exception:
            _logger.exception("%s failed", request.headers["x-request-id"])
            return LineResponse(500, b'{"error":{"message":"internal error: the log says more"}}')
        finally:
            line_exchange.disconnected()  # if it was cancelled, its worker stops


class AnswerWriter:
    """Writes the answers of one batch: those that come while others are written go into one transaction."""

    def __init__(
        self, batch_journal: journal.BatchJournal, batch_id: str, clock: clocks.Clock
    ) -> None:
        self._journal = batch_journal
        self._batch_id = batch_id
        self._clock = clock
        self._unwritten: list[journal.LineAnswer] = []
        self._writing = asyncio.Lock()

    async def add(self, answer: journal.LineAnswer) -> None:
        """Write an answer, and return once it is written: it is kept while the disk is full."""
        self._unwritten.append(answer)
        async with self._writing:
            while answers := self._unwritten:
                self._unwritten = []
                try:
                    await asyncio.to_thread(self._journal.add_answers, self._batch_id, answers)
                except errors.Unavailable as error:
                    _logger.warning("%s waits to write answers: %s", self._batch_id, error)
                    self._unwritten += answers
                    await self._clock.sleep(POLL_S)


def _read_chunk(remaining: Iterator[lines.LineRequest]) -> list[lines.LineRequest]:
    """Return the next requests, together not much longer than one slot allows or than one long line."""
    chunk: list[lines.LineRequest] = []
    num_bytes = 0
    while len(chunk) < _CHUNK and num_bytes < _SLOT_BYTES:
        line = next(remaining, None)
        if line is None:
            break
        chunk.append(line)
        num_bytes += len(line.body)
    return chunk


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _line_id(batch: lines.Batch, number: int) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
