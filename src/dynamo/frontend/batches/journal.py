"""The journal of files and batches: SQLite and plain files in one folder, which survive every process.

Several processes may use it at once. Each operation opens the database anew (0.1 ms), so that it can run in any thread;
all of them block and belong into a thread. The answer of a line is inserted once under its number, by any process,
so an output file has each line once. SQLite's log is written at each commit, which a killed process cannot undo; after
a loss of power the last commits may be missing, and their lines are asked again.

    FOLDER/journal.sqlite3    tables of files, batches, and answers that are in no file yet
    FOLDER/content/FILE_ID    the content of a file
    FOLDER/partial/…          what is being uploaded or written
"""

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.batches import lines
from dynamo.protocols import model_errors

MAX_FILE_BYTES = 512 * 2**20  # as with OpenAI
_PARTIAL_S = 24 * 3600.0  # after which what is partial belongs to a process that is gone
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, purpose TEXT, bytes INTEGER, expires_at INTEGER, json BLOB);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, key_name TEXT, is_ended INTEGER, output_s INTEGER,
  expires_at INTEGER, json BLOB);
CREATE TABLE IF NOT EXISTS answers (
  batch TEXT, line INTEGER, is_error INTEGER, row BLOB, PRIMARY KEY (batch, line)) WITHOUT ROWID;
"""
# A batch is taken to write as much as it reads, until it has ended and its files are there.
_SUM_BYTES = """
SELECT coalesce(sum(bytes), 0) FROM (SELECT bytes FROM files UNION ALL SELECT bytes FROM batches
  JOIN files ON files.id = json_extract(CAST(batches.json AS TEXT), '$.input_file_id') WHERE NOT is_ended);
"""
_ANSWERS = "SELECT row FROM answers WHERE batch = ? AND is_error = ? ORDER BY line"
_encode = msgspec.json.Encoder().encode
_decode_file = msgspec.json.Decoder(lines.FileObject).decode
_decode_batch = msgspec.json.Decoder(lines.Batch).decode


class OpenBatch(NamedTuple):
    """A batch that has not ended, with its tenant."""

    batch: lines.Batch
    tenant: str
    key_name: str | None  # the API key that gives its lines their rights


class LineAnswer(NamedTuple):
    """The row of a line in the output or the error file."""

    number: int
    is_error: bool
    row: bytes


class BatchJournal:
    """The files and batches in one folder, which is made when the first file comes."""

    def __init__(self, folder: Path, clock: clocks.Clock, *, max_bytes: int) -> None:
        """Keep at most `max_bytes` of files together."""
        self.folder = folder
        self._clock = clock
        self._max_bytes = max_bytes

    @property
    def exists(self) -> bool:
        """Return whether there has been a file."""
        return (self.folder / "journal.sqlite3").exists()

    def prepare(self) -> None:
        """Make the folder. Raises Unavailable if it cannot be written."""
        try:
            for name in ("", "content", "partial"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "journal.sqlite3").touch(mode=0o600)  # SQLite asks 0644
            with self._open() as database:
                database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise errors.Unavailable(
                f"files cannot be kept in {self.folder}: {error}: free it, or choose another --files-dir"
            ) from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the database for one transaction. Raises Unavailable if it cannot be used."""
        try:
            path = self.folder / "journal.sqlite3"
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                with database:
                    yield database
        except sqlite3.Error as error:
            raise errors.Unavailable(
                f"the journal in {self.folder} cannot be used: {error}"
            ) from error

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the database open, because closing it for the last time takes milliseconds (it writes its log)."""
        with self._open() as database:
            database.execute("SELECT count(*) FROM files").fetchone()  # opens the log, too
            yield

    # Files

    def new_partial(self) -> Path:
        """Return a path for content that is not complete yet."""
        return self.folder / "partial" / secrets.token_hex(12)

    def add_file(
        self, partial: Path, *, tenant: str, filename: str, kept_s: int = lines.KEPT_S
    ) -> lines.FileObject:
        """Keep a complete partial file. Raises InvalidRequest if all files together become too large."""
        with self._exclusive() as database:
            self._check_room(database, partial.stat().st_size, "file")
            return self._insert_file(database, partial, tenant, filename, "batch", kept_s)

    def check_room(self, num_bytes: int) -> None:
        """Raise InvalidRequest if so many bytes more make all files together too large."""
        with self._open() as database:
            self._check_room(database, num_bytes, "file")

    def _check_room(self, database: sqlite3.Connection, num_bytes: int, param: str) -> None:
        (sum_bytes,) = database.execute(_SUM_BYTES).fetchone()
        sum_bytes += num_bytes
        if sum_bytes > self._max_bytes:
            raise errors.InvalidRequest(
                f"expected at most {self._max_bytes} bytes of files together, got {sum_bytes} with what open "
                "batches write: delete files, or raise --files-limit-gb",
                param=param,
            )

    def _insert_file(
        self,
        database: sqlite3.Connection,
        partial: Path,
        tenant: str,
        filename: str,
        purpose: lines.Purpose,
        kept_s: int,
    ) -> lines.FileObject:
        """Keep a complete partial file from now on, for `kept_s` seconds."""
        now = int(self._clock.wall())
        kept = lines.FileObject(
            id=f"file-{secrets.token_hex(12)}",
            bytes=partial.stat().st_size,
            created_at=now,
            expires_at=now + kept_s,
            filename=filename,
            purpose=purpose,
        )
        partial.rename(self._content(kept.id))
        database.execute(
            "INSERT INTO files (id, tenant, purpose, bytes, expires_at, json) VALUES (?, ?, ?, ?, ?, ?)",
            (kept.id, tenant, kept.purpose, kept.bytes, kept.expires_at, _encode(kept)),
        )
        return kept

    def _content(self, file_id: str) -> Path:
        return self.folder / "content" / file_id

    def find_file(self, file_id: str, tenant: str) -> lines.FileObject:
        """Return a file of a tenant. Raises ObjectNotFound."""
        return _decode_file(self._find("files", file_id, tenant))

    def open_file(self, file_id: str, tenant: str) -> BinaryIO:
        """Open the content of a file, to be read to its end though it is deleted meanwhile. Raises ObjectNotFound."""
        self.find_file(file_id, tenant)
        try:
            return self._content(file_id).open("rb")
        except FileNotFoundError as error:
            raise _no_such("files", file_id) from error

    def list_files(
        self, tenant: str, options: lines.PageOptions, purpose: str | None = None
    ) -> lines.FilePage:
        """Return a page of a tenant's files. Raises ObjectNotFound for an unknown `after`."""
        rows, has_more = self._page("files", tenant, options, purpose)
        return lines.FilePage(**lines.page_fields([_decode_file(row) for row in rows], has_more))

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises ObjectNotFound, or Conflict while a batch reads it."""
        self.find_file(file_id, tenant)
        with self._exclusive() as database:
            for (row,) in database.execute("SELECT json FROM batches WHERE NOT is_ended"):
                batch = _decode_batch(row)
                if batch.input_file_id == file_id:
                    raise errors.Conflict(
                        f"the batch {batch.id} reads this file: cancel the batch first, or wait for its end"
                    )
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._content(file_id).unlink(missing_ok=True)

    # Batches

    def add_batch(
        self, asked: lines.BatchRequest, tenant: str, key_name: str | None
    ) -> lines.Batch:
        """Begin a batch.

        Raises ObjectNotFound for an unknown input file, InvalidRequest for one that is an output, or if files together
        may become too large.
        """
        source = self.find_file(asked.input_file_id, tenant)
        if source.purpose != "batch":
            raise errors.InvalidRequest.of_param(
                "input_file_id", f"expected a file of the purpose batch, got {source.purpose}"
            )
        now = int(self._clock.wall())
        batch = lines.Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            created_at=now,
            expires_at=now + lines.DAY_S,
            metadata=asked.metadata,
        )
        rule = asked.output_expires_after
        values = (batch.id, tenant, key_name, rule.seconds if rule else lines.KEPT_S)
        with self._exclusive() as database:
            self._check_room(database, source.bytes, "input_file_id")
            database.execute(
                "INSERT INTO batches (id, tenant, key_name, output_s, is_ended, expires_at, json)"
                " VALUES (?, ?, ?, ?, 0, ?, ?)",
                (*values, now + lines.KEPT_S, _encode(batch)),
            )
        return batch

    def find_batch(self, batch_id: str, tenant: str) -> lines.Batch:
        """Return a batch of a tenant with its present counts. Raises ObjectNotFound."""
        return self._with_counts(_decode_batch(self._find("batches", batch_id, tenant)))

    def list_batches(self, tenant: str, options: lines.PageOptions) -> lines.BatchPage:
        """Return a page of a tenant's batches. Raises ObjectNotFound for an unknown `after`."""
        rows, has_more = self._page("batches", tenant, options)
        batches = [self._with_counts(_decode_batch(row)) for row in rows]
        return lines.BatchPage(**lines.page_fields(batches, has_more))

    def open_batches(self) -> list[OpenBatch]:
        """Return the batches of all tenants that have not ended, oldest first."""
        with self._open() as database:
            rows = database.execute(
                "SELECT json, tenant, key_name FROM batches WHERE NOT is_ended ORDER BY number"
            ).fetchall()
        return [OpenBatch(_decode_batch(row), tenant, key) for row, tenant, key in rows]

    def cancel_batch(self, batch_id: str, tenant: str) -> lines.Batch:
        """Have a batch cancelled. Raises ObjectNotFound, or Conflict if it has ended."""
        self.find_batch(batch_id, tenant)

        def cancel(batch: lines.Batch) -> lines.Batch:
            if batch.status in lines.ENDED:
                raise errors.Conflict(f"the batch is {batch.status}: there is nothing to cancel")
            if batch.status in ("cancelling", "finalizing"):
                return batch
            return batch.with_status("cancelling", self._clock.wall())

        return self._with_counts(self._change(batch_id, cancel))

    def check_input(self, batch_id: str, max_body_bytes: int) -> lines.Batch:
        """Check all lines of a batch's file, and return the batch: in progress, or failed."""
        with self._open() as database:
            row = database.execute("SELECT json FROM batches WHERE id = ?", (batch_id,)).fetchone()
        batch = _decode_batch(row[0])
        check = lines.FileCheck(batch.endpoint, max_body_bytes)
        try:
            for number, row in self._rows(batch, max_body_bytes):
                check.add(row, number)
                if check.is_over:
                    break
            wrong = check.result()
        except FileNotFoundError:
            wrong = [lines.FILE_GONE]

        def begin(current: lines.Batch) -> lines.Batch:
            if current.status != "validating":  # it was cancelled
                return current
            if wrong:
                return current.with_status(
                    "failed", self._clock.wall(), errors=lines.LineErrors(data=wrong)
                )
            counts = lines.RequestCounts(total=check.num_lines)
            return current.with_status("in_progress", self._clock.wall(), request_counts=counts)

        return self._change(batch_id, begin)

    def unanswered(self, batch: lines.Batch, max_body_bytes: int) -> Generator[tuple[int, bytes]]:
        """Yield number and row of each line of a batch that has no answer yet."""
        with self._open() as database:
            numbers = database.execute("SELECT line FROM answers WHERE batch = ?", (batch.id,))
            answered = {number for (number,) in numbers}
        for number, row in self._rows(batch, max_body_bytes):
            if number not in answered:
                yield number, row

    def _rows(self, batch: lines.Batch, max_bytes: int) -> Generator[tuple[int, bytes]]:
        """Yield number and text of each row that is not blank; of a row that is too long, too much by one byte."""
        number = 0
        with self._content(batch.input_file_id).open("rb") as content:
            while row := content.readline(max_bytes + 1):
                number += 1
                rest = row
                while len(rest) > max_bytes and not rest.endswith(b"\n"):
                    rest = content.readline(max_bytes + 1)
                if row.strip():
                    yield number, row

    def add_answers(self, batch_id: str, answers: Sequence[LineAnswer]) -> None:
        """Keep the answers of lines; the first answer of each line stands."""
        with self._open() as database:
            database.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)",
                [(batch_id, one.number, one.is_error, one.row) for one in answers],
            )

    def answered_models(self, batch_id: str) -> set[str]:
        """Return the models that have answered lines of a batch, by their names in the answers."""
        with self._open() as database:
            rows = database.execute(_ANSWERS, (batch_id, False))
            return {lines.model_of(row) for (row,) in rows}

    def finish(
        self, batch_id: str, status: lines.Status, wrong: Sequence[lines.LineError] = ()
    ) -> lines.Batch:
        """End a batch, or fail it for `wrong`: write its answers into an output and an error file, in their order."""

        def begin(batch: lines.Batch) -> lines.Batch:
            is_cancelled = batch.status == "cancelling"
            return batch if is_cancelled else batch.with_status("finalizing", self._clock.wall())

        # what is cancelled or expired keeps its reason, if this process dies here
        if status == "completed" and self._change(batch_id, begin).status == "cancelling":
            status = "cancelled"
        with (
            self._answers_file(batch_id, False) as output,
            self._answers_file(batch_id, True) as failed,
            self._exclusive() as database,
        ):
            row, tenant, kept_s = database.execute(
                "SELECT json, tenant, output_s FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            batch = self._counted(database, _decode_batch(row))
            ids: dict[str, str] = {}
            for name, partial in (("output", output), ("errors", failed)):
                if partial is not None:
                    filename = f"{batch_id}_{name}.jsonl"
                    ids[name] = self._insert_file(
                        database, partial, tenant, filename, "batch_output", kept_s
                    ).id
            batch = batch.with_status(
                status,
                self._clock.wall(),
                output_file_id=ids.get("output"),
                error_file_id=ids.get("errors"),
                errors=lines.LineErrors(data=[*wrong]) if wrong else None,
                **lines.summarize(row for (row,) in database.execute(_ANSWERS, (batch_id, 0))),
            )
            self._update(database, batch)
            database.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))
        return batch

    @contextlib.contextmanager
    def _answers_file(self, batch_id: str, is_error: bool) -> Iterator[Path | None]:
        """Write the answers of one kind to a file that is deleted unless the block keeps it; None: there are none."""
        partial = self.new_partial()
        try:
            with self._open() as database, open_private(partial) as output:
                rows = database.execute(_ANSWERS, (batch_id, is_error))
                output.writelines(row for (row,) in rows)
                output.flush()
                os.fsync(output.fileno())
            yield partial if partial.stat().st_size else None
        finally:
            partial.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete files and ended batches that have expired, and content that belongs to none."""
        now = int(self._clock.wall())
        with self._exclusive() as database:
            reading = {
                _decode_batch(row).input_file_id
                for (row,) in database.execute("SELECT json FROM batches WHERE NOT is_ended")
            }
            old = database.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall()
            gone = [(file_id,) for (file_id,) in old if file_id not in reading]
            database.executemany("DELETE FROM files WHERE id = ?", gone)
            database.execute("DELETE FROM batches WHERE is_ended AND expires_at <= ?", (now,))
            known = {file_id for (file_id,) in database.execute("SELECT id FROM files")}
            for content in (self.folder / "content").iterdir():  # no process adds a file meanwhile
                if content.name not in known:
                    content.unlink(missing_ok=True)
        for partial in (self.folder / "partial").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if partial.stat().st_mtime < now - _PARTIAL_S:
                    partial.unlink()

    # Rows

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[sqlite3.Connection]:
        """Open the database for a transaction, with no other writer beside it."""
        with self._open() as database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    def _change(self, batch_id: str, change: Callable[[lines.Batch], lines.Batch]) -> lines.Batch:
        with self._exclusive() as database:
            (row,) = database.execute(
                "SELECT json FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            changed = change(_decode_batch(row))
            self._update(database, changed)
        return changed

    @staticmethod
    def _update(database: sqlite3.Connection, batch: lines.Batch) -> None:
        database.execute(
            "UPDATE batches SET json = ?, is_ended = ? WHERE id = ?",
            (_encode(batch), batch.status in lines.ENDED, batch.id),
        )

    def _with_counts(self, batch: lines.Batch) -> lines.Batch:
        if batch.status in lines.ENDED:
            return batch
        with self._open() as database:
            return self._counted(database, batch)

    @staticmethod
    def _counted(database: sqlite3.Connection, batch: lines.Batch) -> lines.Batch:
        num_answers, num_errors = database.execute(
            "SELECT count(*), coalesce(sum(is_error), 0) FROM answers WHERE batch = ?", (batch.id,)
        ).fetchone()
        counts = lines.RequestCounts(
            total=batch.request_counts.total,
            completed=num_answers - num_errors,
            failed=num_errors,
        )
        return msgspec.structs.replace(batch, request_counts=counts)

    def _find(self, table: str, object_id: str, tenant: str) -> bytes:
        row = None
        if self.exists:
            with self._open() as database:
                row = self._find_in(database, table, object_id, tenant)
        if row is None:
            raise _no_such(table, object_id)
        return row

    @staticmethod
    def _find_in(
        database: sqlite3.Connection, table: str, object_id: str, tenant: str
    ) -> bytes | None:
        query = f"SELECT json FROM {table} WHERE id = ? AND tenant = ?"
        row = database.execute(query, (object_id, tenant)).fetchone()
        return None if row is None else row[0]

    def _page(
        self, table: str, tenant: str, options: lines.PageOptions, purpose: str | None = None
    ) -> tuple[list[bytes], bool]:
        """Return a page of rows, and whether more follow."""
        if not self.exists:
            return [], False
        sign, order = (">", "ASC") if options.is_ascending else ("<", "DESC")
        where, values = "tenant = ?", [tenant]
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        with self._open() as database:
            if options.after is not None:
                if self._find_in(database, table, options.after, tenant) is None:
                    raise _no_such(table, options.after)
                where += f" AND number {sign} (SELECT number FROM {table} WHERE id = ?)"
                values.append(options.after)
            query = f"SELECT json FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
            rows = database.execute(query, (*values, options.limit + 1)).fetchall()
        return [row for (row,) in rows[: options.limit]], len(rows) > options.limit


def open_private(path: Path) -> BinaryIO:
    """Create a file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _no_such(table: str, object_id: str) -> model_errors.ObjectNotFound:
    kind = "file" if table == "files" else "batch"
    return model_errors.ObjectNotFound(
        f"there is no {kind} {object_id[:100]!r}: it has expired, or was deleted, or never was"
    )
