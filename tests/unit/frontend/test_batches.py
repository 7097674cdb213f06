"""Files and batches, asked over HTTP of a frontend with a scripted worker."""

import asyncio
import io
import json
import os

import openai
import pytest
from frontend_rig import outputs

from dynamo.frontend import config
from dynamo.frontend.batches import journal, runner
from dynamo.frontend.batches import lines as batch_lines
from dynamo.protocols import model_errors
from dynamo.testing.clock import VirtualClock
from waiting import PATIENT_S

CHAT = "/v1/chat/completions"
KEYS = """
[tenants.acme]
[tenants.other]

[[keys]]
name = "ann"
key = "sk-ann-00001"
tenant = "acme"

[[keys]]
name = "bob"
key = "sk-bob-00001"
tenant = "other"
"""
ANN, BOB = ({"authorization": f"Bearer sk-{name}-00001"} for name in ("ann", "bob"))


def chat_line(number, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": f"hi {number}"}]}
    return {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": body | fields}


def as_jsonl(lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture
def start(bare, tmp_path, monkeypatch):
    """Start a frontend with a worker, whose batches are looked at every 10 ms."""

    async def start(**settings):
        monkeypatch.setattr(runner, "POLL_S", 0.01)
        await bare.start(files_dir=str(tmp_path / "files"), **settings)
        bare.one = await bare.worker()
        return bare

    return start


async def upload(rig, content, headers=(), **fields):
    return await rig.client.post(
        "/v1/files",
        files={"file": ("questions.jsonl", content)},
        data={"purpose": "batch", **fields},
        headers=dict(headers),
    )


async def begin(rig, lines, headers=(), endpoint=CHAT, **fields):
    """Upload lines, and begin their batch."""
    file_id = (await upload(rig, as_jsonl(lines), headers)).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
    response = await rig.client.post("/v1/batches", json=asked, headers=dict(headers))
    assert response.status_code == 200, response.text
    return response.json()


async def ended(rig, batch, headers=()):
    """Wait until a batch has ended."""
    async with asyncio.timeout(PATIENT_S):
        while batch["status"] not in batch_lines.ENDED:
            await asyncio.sleep(0.005)
            path = f"/v1/batches/{batch['id']}"
            batch = (await rig.client.get(path, headers=dict(headers))).json()
    return batch


async def rows(rig, file_id, headers=()):
    content = await rig.client.get(f"/v1/files/{file_id}/content", headers=dict(headers))
    assert content.status_code == 200, content.text
    return [json.loads(row) for row in content.text.splitlines()]


async def test_batch_answers_each_line_in_the_order_of_its_file(start):
    rig = await start()
    batch = await begin(rig, [chat_line(number) for number in range(50)], metadata={"a": "b"})
    batch = await ended(rig, batch)

    answers = await rows(rig, batch["output_file_id"])
    assert [row["custom_id"] for row in answers] == [f"line {number}" for number in range(50)]
    assert {row["response"]["status_code"] for row in answers} == {200}
    assert answers[7]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert batch["metadata"] == {"a": "b"}


@pytest.mark.parametrize(
    ("endpoint", "body", "names"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, ("prompt", "completion")),
        ("/v1/responses", {"input": "hi"}, ("input", "output")),
    ],
)
async def test_batch_has_model_and_usage_of_its_answers(start, endpoint, body, names):
    rig = await start()
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": endpoint,
            "body": {"model": "m", **body},
        }
        for number in range(3)
    ]
    batch = await begin(rig, lines, endpoint=endpoint)
    ended_batch = await ended(rig, batch)
    usages = [
        row["response"]["body"]["usage"] for row in await rows(rig, ended_batch["output_file_id"])
    ]
    num_in, num_out = (sum(usage[f"{name}_tokens"] for usage in usages) for name in names)

    assert (batch["model"], batch["usage"]) == (None, None)
    assert ended_batch["model"] == "m"
    assert num_in > 0
    assert ended_batch["usage"] == {
        "input_tokens": num_in,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_in + num_out,
    }


async def test_lines_wait_behind_requests_of_clients(start):
    rig = await start()
    await ended(rig, await begin(rig, [chat_line(1)]))
    await rig.chat()

    assert [one.priority for one in rig.one.requests] == [-(2**20), 0]


async def test_line_that_fails_stands_in_the_error_file(start, monkeypatch):
    monkeypatch.setattr(runner, "MODEL_WAIT_S", 0)
    rig = await start(worker_wait_secs=0)
    lines = [chat_line(1), chat_line(2, model="unknown"), chat_line(3, temperature=99)]
    batch = await ended(rig, await begin(rig, lines))

    failed = await rows(rig, batch["error_file_id"])
    assert [(row["custom_id"], row["response"]["status_code"]) for row in failed] == [
        ("line 2", 404),
        ("line 3", 400),
    ]
    assert "temperature" in failed[1]["response"]["body"]["error"]["message"]
    assert [row["custom_id"] for row in await rows(rig, batch["output_file_id"])] == ["line 1"]
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_line_waits_for_a_model_that_has_lost_its_workers(start):
    rig = await start(worker_wait_secs=0, batch_concurrency=1)
    await ended(rig, await begin(rig, [chat_line(0)]))
    await rig.one.runtime.close()
    await rig.until(lambda: not rig.instances)
    batch = await begin(rig, [chat_line(1)])
    await rig.until(lambda: _is_refused(rig))
    await rig.worker()

    assert (await ended(rig, batch))["request_counts"]["completed"] == 1


async def _is_refused(rig):
    return any("model_rejection_total" in name for name in await rig.metrics())


async def test_lines_that_wait_for_a_model_do_not_hold_up_other_batches(start):
    rig = await start(worker_wait_secs=0, batch_concurrency=1)
    other = await rig.worker("n")
    await ended(rig, await begin(rig, [chat_line(0)]))
    await rig.one.runtime.close()
    await rig.until(lambda: len(rig.instances) == 1)
    waiting = await begin(rig, [chat_line(number) for number in range(3)])
    await rig.until(lambda: _is_refused(rig))
    lines = [chat_line(number, model="n") for number in range(3)]

    assert (await ended(rig, await begin(rig, lines)))["request_counts"]["completed"] == 3
    assert len(other.requests) == 3
    await rig.worker()
    assert (await ended(rig, waiting))["request_counts"]["completed"] == 3


async def test_line_waits_for_a_model_that_has_answered_before(start, monkeypatch):
    monkeypatch.setattr(runner, "MODEL_WAIT_S", 0)
    rig = await start(worker_wait_secs=0, batch_concurrency=1)
    gone = []

    def answer_and_go(call, request):
        for output in outputs("hello"):
            call.send(output)
        call.finish()
        gone.append(rig.start_task(rig.one.runtime.close()))

    rig.one.script = answer_and_go
    batch = await begin(rig, [chat_line(1), chat_line(2)])
    await rig.until(lambda: gone and gone[0].done())
    await rig.worker()
    batch = await ended(rig, batch)

    assert batch["request_counts"]["completed"] == 2


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"hello\n", "invalid_json_line", 1),
        (as_jsonl([chat_line(1), chat_line(1)]), "duplicate_custom_id", 2),
        (as_jsonl([chat_line(1) | {"url": "/v1/embeddings"}]), "mismatched_url", 1),
        (as_jsonl([chat_line(1) | {"method": "GET"}]), "invalid_json_line", 1),
        (as_jsonl([chat_line(1, stream=True)]), "invalid_request", 1),
        (as_jsonl([chat_line("x" * 2**20)]), "line_too_large", 1),
        (as_jsonl([chat_line(n) for n in range(50_001)]), "too_many_lines", None),
    ],
)
async def test_file_with_a_wrong_line_fails_the_batch(start, content, code, line):
    rig = await start(http_body_limit_mb=1)
    file_id = (await upload(rig, content)).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = await ended(rig, (await rig.client.post("/v1/batches", json=asked)).json())

    assert batch["status"] == "failed"
    [error] = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, line)
    assert rig.one.requests == []


async def test_cancelled_batch_keeps_what_is_answered(start):
    rig = await start(batch_concurrency=4)
    hung = []

    def answer_two(call, request):
        if len(rig.one.requests) > 2:
            hung.append(call)
            return
        for output in outputs("hello"):
            call.send(output)
        call.finish()

    rig.one.script = answer_two
    batch = await begin(rig, [chat_line(number) for number in range(20)])
    path = f"/v1/batches/{batch['id']}"

    async with asyncio.timeout(PATIENT_S):
        while (await rig.client.get(path)).json()["request_counts"]["completed"] < 2:
            await asyncio.sleep(0.005)
    cancelling = (await rig.client.post(f"{path}/cancel")).json()
    batch = await ended(rig, cancelling)

    assert cancelling["status"] == "cancelling"
    assert batch["status"] == "cancelled"
    assert len(await rows(rig, batch["output_file_id"])) == 2
    await rig.until(lambda: rig.one.num_cancelled == len(hung) > 0)
    assert (await rig.client.post(f"{path}/cancel")).status_code == 409


async def test_lines_of_an_expired_batch_stand_in_the_error_file(start, monkeypatch):
    monkeypatch.setattr(batch_lines, "DAY_S", 1)
    rig = await start()
    rig.one.script = lambda call, request: None
    batch = await ended(rig, await begin(rig, [chat_line(1), chat_line(2)]))

    assert batch["status"] == "expired"
    failed = await rows(rig, batch["error_file_id"])
    assert [(row["custom_id"], row["error"]["code"]) for row in failed] == [
        ("line 1", "batch_expired"),
        ("line 2", "batch_expired"),
    ]


@pytest.fixture
async def guarded(start, tmp_path):
    """A frontend with API keys."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return await start(api_keys_file=str(path))


async def test_lines_have_the_rights_of_their_key(guarded):
    batch = await ended(guarded, await begin(guarded, [chat_line(1)], ANN), ANN)

    assert batch["request_counts"]["completed"] == 1
    assert len(guarded.one.requests) == 1


async def test_nobody_without_a_key_reads_files(guarded):
    for path in ("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"):
        assert (await guarded.client.get(path)).status_code == 401, path
    assert (await upload(guarded, b"x")).status_code == 401


async def test_another_tenant_finds_neither_file_nor_batch(guarded):
    batch = await ended(guarded, await begin(guarded, [chat_line(1)], ANN), ANN)
    output = batch["output_file_id"]

    for method, path in [
        ("GET", f"/v1/files/{output}"),
        ("GET", f"/v1/files/{output}/content"),
        ("DELETE", f"/v1/files/{output}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/v1/files?after={output}"),
    ]:
        response = await guarded.client.request(method, path, headers=BOB)
        assert response.status_code == 404, path
    for path in ("/v1/files", "/v1/batches"):
        assert (await guarded.client.get(path, headers=BOB)).json()["data"] == []
    asked = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await guarded.client.post("/v1/batches", json=asked, headers=BOB)).status_code == 404


async def test_all_files_are_listed_where_no_limit_is_given(start):
    rig = await start()
    for number in range(21):
        await upload(rig, b"%d" % number)
    page = (await rig.client.get("/v1/files")).json()

    assert (len(page["data"]), page["has_more"]) == (21, False)


async def test_files_are_listed_page_by_page(start):
    rig = await start()
    ids = [(await upload(rig, b"%d" % number)).json()["id"] for number in range(5)]
    newest = (await rig.client.get("/v1/files?limit=2")).json()
    older = (await rig.client.get(f"/v1/files?limit=3&after={newest['last_id']}")).json()
    oldest = (await rig.client.get("/v1/files?order=asc&limit=1&purpose=batch")).json()

    assert [file["id"] for file in newest["data"]] == [ids[4], ids[3]]
    assert newest["has_more"]
    assert [file["id"] for file in older["data"]] == [ids[2], ids[1], ids[0]]
    assert not older["has_more"]
    assert [file["id"] for file in oldest["data"]] == [ids[0]]
    assert (await rig.client.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for query in (
        "limit=0",
        "limit=x",
        "limit=99999",
        "limit=00000000199999",
        "order=up",
        "after=file-unknown",
    ):
        assert (await rig.client.get(f"/v1/files?{query}")).status_code in (400, 404), query


async def test_deleted_file_is_gone(start):
    rig = await start()
    file_id = (await upload(rig, b"text")).json()["id"]
    deleted = await rig.client.delete(f"/v1/files/{file_id}")

    assert deleted.json() == {"id": file_id, "object": "file", "deleted": True}
    assert (await rig.client.get(f"/v1/files/{file_id}")).status_code == 404
    assert list((rig.frontend._batches.journal.folder / "content").iterdir()) == []


class UnreadableFile(io.BytesIO):
    """A file of which nothing may be read."""

    def read(self, *_):
        raise AssertionError("expected no read")


async def test_head_of_a_content_reads_nothing_of_it(start):
    rig = await start()
    file_id = (await upload(rig, b"text")).json()["id"]
    rig.frontend._batches.journal.open_file = lambda *_: UnreadableFile()
    head = await rig.client.head(f"/v1/files/{file_id}/content")

    assert (head.status_code, head.content) == (200, b"")


async def test_file_that_a_batch_reads_cannot_be_deleted(start):
    rig = await start()
    rig.one.script = lambda call, request: None
    batch = await begin(rig, [chat_line(1)])
    refused = await rig.client.delete(f"/v1/files/{batch['input_file_id']}")

    assert refused.status_code == 409
    assert "cancel the batch" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "changes", [{"endpoint": "/v1/other"}, {"completion_window": "1h"}, {"input_file_id": ""}]
)
async def test_batch_that_cannot_be_is_refused(start, changes):
    rig = await start()
    asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"} | changes
    response = await rig.client.post("/v1/batches", json=asked)

    assert response.status_code == 400
    assert next(iter(changes)) in response.json()["error"]["message"]


async def test_without_a_file_nothing_is_written(start):
    rig = await start()

    assert (await rig.client.get("/v1/files")).json()["data"] == []
    assert (await rig.client.get("/v1/batches")).json()["data"] == []
    assert (await rig.client.delete("/v1/files/file-1")).status_code == 404
    assert (await rig.client.post("/v1/batches/batch_1/cancel")).status_code == 404
    assert not rig.frontend._batches.journal.folder.exists()


async def test_more_files_than_may_be_kept_are_refused(start):
    rig = await start(files_limit_gb=1e-6)

    assert (await upload(rig, b"x" * 900)).status_code == 200
    refused = await upload(rig, b"x" * 101)
    assert refused.status_code == 400
    assert "expected at most 1000 bytes of files together, got 1001" in refused.text


async def test_what_batches_write_counts_as_files(start):
    rig = await start(files_limit_gb=2e-6)
    rows = as_jsonl([chat_line(1, temperature=5)])  # an answer at once, and longer than the line
    file_id = (await upload(rig, rows + b" " * (800 - len(rows)))).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    first = await rig.client.post("/v1/batches", json=asked)
    beside = await rig.client.post("/v1/batches", json=asked)
    await ended(rig, first.json())
    await ended(rig, (await rig.client.post("/v1/batches", json=asked)).json())
    at_last = await rig.client.post("/v1/batches", json=asked)

    assert [answer.status_code for answer in (beside, at_last)] == [400, 400]
    for answer in (beside, at_last):
        assert answer.json()["error"]["param"] == "input_file_id"
        assert "expected at most 2000 bytes of files together" in answer.text


async def test_file_expires_by_the_clock_of_its_process(tmp_path):
    clock = VirtualClock()
    files = journal.BatchJournal(tmp_path, clock, max_bytes=10**9)
    files.prepare()
    partial = files.new_partial()
    partial.write_bytes(b"{}")
    file = files.add_file(partial, tenant="acme", filename="a.jsonl", kept_s=3600)
    await clock.advance(3599)
    files.sweep()
    assert file.created_at == int(clock.wall() - 3599)
    assert files.find_file(file.id, "acme") == file

    await clock.advance(1)
    files.sweep()

    with pytest.raises(model_errors.ObjectNotFound):
        files.find_file(file.id, "acme")


async def test_only_one_of_two_frontends_asks_the_lines(start, bare):
    rig = await start()
    other = runner.BatchRunner(
        journal.BatchJournal(
            rig.frontend._batches.journal.folder, rig.frontend._clock, max_bytes=10**9
        ),
        rig.frontend._clock, concurrency=4, max_body_bytes=2**20,
    )  # fmt: skip
    asked = []
    await upload(rig, b"so that there is a journal")
    await rig.until(lambda: not _is_free(other))
    rig.start_task(other.run(asked.append, lambda name: {}))
    await ended(rig, await begin(rig, [chat_line(number) for number in range(20)]))

    assert asked == []
    assert len(rig.one.requests) == 20


async def test_batch_with_a_line_above_a_lowered_limit_fails(start, tmp_path):
    rig = await start()
    files = journal.BatchJournal(tmp_path / "kept", rig.frontend._clock, max_bytes=10**9)
    files.prepare()
    partial = files.new_partial()
    partial.write_bytes(as_jsonl([chat_line(1)]))
    file = files.add_file(partial, tenant="acme", filename="a.jsonl")
    asked = batch_lines.BatchRequest(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = files.add_batch(asked, "acme", None)
    assert files.check_input(batch.id, 2**20).status == "in_progress"
    later = runner.BatchRunner(files, rig.frontend._clock, concurrency=1, max_body_bytes=50)
    rig.start_task(later.run(rig.frontend._app.routes, lambda name: {}))
    await rig.until(lambda: files.find_batch(batch.id, "acme").status in batch_lines.ENDED)

    failed = files.find_batch(batch.id, "acme")
    assert (failed.status, failed.errors.data[0].code) == ("failed", "line_too_large")


async def test_batches_wait_while_their_folder_cannot_be_used(start, caplog):
    rig = await start()
    lock = rig.frontend._batches.journal.folder / "lock"
    lock.mkdir(parents=True)
    batch = await begin(rig, [chat_line(1)])
    serving = rig.start_task(rig.frontend.run(asyncio.Event()))
    await rig.until(lambda: "batches wait: [Errno 21]" in caplog.text or serving.done())
    assert not serving.done()
    lock.rmdir()

    assert (await ended(rig, batch))["request_counts"]["completed"] == 1


def _is_free(batch_runner):
    with batch_runner._hold_lock() as is_held:
        return is_held


async def test_official_client_runs_a_batch(start):
    rig = await start()
    async with openai.AsyncOpenAI(base_url=f"{rig.frontend.url}/v1", api_key="none") as client:
        file = await client.files.create(
            file=("lines.jsonl", as_jsonl([chat_line(1)])),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        await ended(rig, batch.to_dict())
        batch = await client.batches.retrieve(batch.id)
        content = await client.files.content(batch.output_file_id)
        listed = [one.id async for one in client.batches.list()]
        kept = {one.id async for one in client.files.list()}

        assert file.expires_at - file.created_at == 3600
        assert batch.request_counts.completed == 1
        assert json.loads(content.text)["custom_id"] == "line 1"
        assert listed == [batch.id]
        assert kept == {file.id, batch.output_file_id}
        with pytest.raises(openai.ConflictError, match="nothing to cancel"):
            await client.batches.cancel(batch.id)
        assert (await client.files.delete(file.id)).deleted


def test_user_without_a_home_has_batches_among_temporary_files(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = config.FrontendConfig().files_folder

    assert folder == tmp_path / f"state-{os.getuid()}" / "dynamo" / "files" / "all"


def test_lists_of_a_line_are_counted_before_memory_is_spent_on_them():
    prompt = "[]," * 400_000 + "[]"
    row = f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{{"prompt":[{prompt}]}}}}'

    with pytest.raises(batch_lines.InvalidLine) as caught:
        batch_lines.parse(row.encode(), 1, "/v1/completions", 2**23)

    assert "300000 lists and objects" in caught.value.reason.message
