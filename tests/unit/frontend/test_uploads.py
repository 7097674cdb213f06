"""Uploads: forms that arrive in pieces, well and badly."""

import asyncio
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import clock, errors
from dynamo.frontend import config
from dynamo.frontend.batches import journal, upload
from dynamo.runtime.http import exchange, parser

KIND = "multipart/form-data; boundary=edge"
PART = b'--edge\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%s\r\n'
END = b"--edge--\r\n"
BAD = parser.Refusal(400, "")
PURPOSE = PART % (b"purpose", b"batch")


def make_journal(folder):
    return journal.BatchJournal(folder, clock.SystemClock(), max_bytes=10**9)


@pytest.fixture
def files(tmp_path):
    return make_journal(tmp_path / "files")


def open_upload(files, kind=KIND, **headers):
    headers = {"content-type": kind} | headers
    request = exchange.Request(
        method="POST", path="/v1/files", query="", headers=headers, body=b"", peer=""
    )
    return upload.FileUpload(request, files)


def take(arriving, form):
    arriving.write(form)
    return arriving.complete()


def left(files):
    return list((files.folder / "partial").iterdir())


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 600), max_size=6))
def test_file_is_the_same_however_it_arrives(tmp_path_factory, content, cuts):
    files = make_journal(tmp_path_factory.mktemp("uploads"))
    arriving = open_upload(files)
    form = PURPOSE + FILE % content.replace(b"--edge", b"") + END
    edges = [0, *sorted(min(cut, len(form)) for cut in cuts), len(form)]
    for start, end in itertools.pairwise(edges):
        arriving.write(form[start:end])

    assert arriving.complete() == 30 * 24 * 3600
    assert arriving.filename == "a.jsonl"
    assert arriving.partial.read_bytes() == content.replace(b"--edge", b"")
    arriving.close()


@given(form=st.binary(max_size=300))
def test_no_form_breaks_the_upload(tmp_path_factory, form):
    files = make_journal(tmp_path_factory.mktemp("uploads"))
    arriving = open_upload(files)
    try:
        arriving.write(form)
        arriving.complete()
    except (parser.RequestRefused, errors.InvalidRequest):
        pass
    finally:
        arriving.close()

    assert left(files) == []


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (FILE % b"x" + END, "expected the purpose batch"),
        (PART % (b"purpose", b"fine-tune") + FILE % b"x" + END, "got 'fine-tune'"),
        (PURPOSE + END, "expected a part `file`"),
        (PURPOSE + FILE % b"x", "expected a complete form"),
        (PURPOSE + PART % (b"expires_after[seconds]", b"5") + FILE % b"x" + END, "from 3600 to"),
        (
            PURPOSE + PART % (b"expires_after[seconds]", b"000000003600000") + FILE % b"x" + END,
            "from 3600 to",
        ),
        (PURPOSE + PURPOSE + FILE % b"x" + END, "one field purpose, got two"),
        (FILE % b"x" + FILE % b"y" + END, "expected one file"),
        (PART % (b"purpose", b"x" * 2000) + END, "at most 1024 bytes"),
        (b"--other\r\n\r\n", "expected a form"),
    ],
)
def test_form_that_is_none_is_refused_with_the_reason(files, form, message):
    arriving = open_upload(files)
    with pytest.raises((parser.RequestRefused, errors.InvalidRequest), match=message) as refused:
        take(arriving, form)
    arriving.close()

    assert getattr(refused.value, "refusal", BAD).status == 400
    assert left(files) == []


def test_other_fields_of_a_form_are_left_out_and_named(files):
    others = b"".join(PART % (b"%d" % number, b"x" * 2000) for number in range(200))
    nameless = b"--edge\r\n\r\ny\r\n"
    arriving = open_upload(files)
    take(arriving, others + nameless + PURPOSE + FILE % b"z" + END)

    assert arriving.ignored_fields == [str(number) for number in range(100)]
    assert arriving.partial.read_bytes() == b"z"
    arriving.close()


async def test_ignored_field_of_an_upload_is_in_a_header(bare, tmp_path):
    await bare.start(files_dir=str(tmp_path / "files"))
    fields = {"purpose": "batch", "provider": "x"}
    answer = await bare.client.post("/v1/files", files={"file": b"{}"}, data=fields)

    assert answer.status_code == 200
    assert answer.headers["x-dynamo-ignored-parameters"] == "provider"


def test_body_that_is_no_form_is_refused_before_it_comes(files):
    for kind in ("application/json", "multipart/form-data", ""):
        with pytest.raises(parser.RequestRefused, match="multipart/form-data with a boundary"):
            open_upload(files, kind)
    with pytest.raises(parser.RequestRefused, match="without Content-Encoding"):
        open_upload(files, **{"content-encoding": "gzip"})


def test_boundary_that_is_too_long_is_refused_and_leaves_nothing(files):
    with pytest.raises(parser.RequestRefused, match="expected a form") as refused:
        open_upload(files, f"multipart/form-data; boundary={'x' * 300}")

    assert refused.value.refusal.status == 400
    assert not files.folder.exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_other_users_read_neither_files_nor_the_journal(tmp_path, files, is_there):
    tmp_path.chmod(0o755)
    if is_there:  # made by an administrator, for all to enter
        files.folder.mkdir(0o755)
    former_mask = os.umask(0o022)
    try:
        files.prepare()
        with files.in_use():  # SQLite's log is there, too
            modes = {path.name: path.stat().st_mode & 0o077 for path in files.folder.iterdir()}
    finally:
        os.umask(former_mask)

    assert modes.keys() >= {"content", "partial", "journal.sqlite3", "journal.sqlite3-wal"}
    assert set(modes.values()) == {0}
    assert files.folder.stat().st_mode & 0o077 == (0o055 if is_there else 0)


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "files").write_text("a file stands in the way")
    with pytest.raises(parser.RequestRefused, match="choose another --files-dir") as refused:
        open_upload(make_journal(tmp_path / "files"))

    assert refused.value.refusal.status == 503


def test_folder_of_an_unknown_user_is_named():
    settings = config.FrontendConfig(files_dir="~no-such-user/files")
    with pytest.raises(errors.ConfigError, match="--files-dir ~no-such-user/files: "):
        _ = settings.files_folder


def test_folder_among_temporary_files_that_others_can_write_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"state-{os.getuid()}").mkdir()
    (tmp_path / f"state-{os.getuid()}").chmod(0o777)

    with pytest.raises(errors.ConfigError, match=r"other users: .* set --files-dir"):
        _ = config.FrontendConfig().files_folder


def fill_disk(arriving):
    arriving._file.close()
    arriving._file = Path("/dev/full").open("wb")  # noqa: SIM115 (the upload closes it)


def test_upload_is_refused_and_leaves_nothing_when_the_disk_is_full(files):
    arriving = open_upload(files)
    fill_disk(arriving)
    arriving.write(PURPOSE + (FILE % b"begins")[:-2])
    with pytest.raises(parser.RequestRefused, match="cannot be written: No space left") as refused:
        arriving.write(bytes(100_000))
    arriving.close()

    assert refused.value.refusal.status == 503
    assert left(files) == []


def test_upload_whose_last_bytes_find_a_full_disk_is_unavailable(files):
    arriving = open_upload(files)
    fill_disk(arriving)
    with pytest.raises(errors.Unavailable, match="cannot be written: No space left"):
        take(arriving, PURPOSE + FILE % b"short" + END)
    arriving.close()

    assert left(files) == []


def test_uploads_that_are_too_large_together_are_refused_before_they_end(tmp_path):
    files = journal.BatchJournal(tmp_path, clock.SystemClock(), max_bytes=10 * 2**20)
    first, second = open_upload(files), open_upload(files)
    for arriving in (first, second):
        arriving.write(PURPOSE + (FILE % b"begins")[:-2])
    first.write(bytes(5 * 2**20))
    second.write(bytes(4 * 2**20))
    with pytest.raises(parser.RequestRefused, match="of files together") as refused:
        second.write(bytes(4 * 2**20))
    first.close()
    second.close()

    assert refused.value.refusal.status == 400
    assert left(files) == []


async def test_upload_that_breaks_off_leaves_nothing(bare, tmp_path):
    await bare.start(files_dir=str(tmp_path / "files"))
    _, writer = await asyncio.open_connection("127.0.0.1", bare.frontend.port)
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-type: {KIND}\r\ncontent-length: 99999\r\n"
    )
    writer.write(head.encode() + b"\r\n" + PURPOSE + (FILE % bytes(20_000))[:-2])
    partial = tmp_path / "files" / "partial"
    await bare.until(
        lambda: partial.is_dir() and any(one.stat().st_size for one in partial.iterdir())
    )
    writer.close()
    await writer.wait_closed()

    await bare.until(lambda: not any(partial.iterdir()))


async def test_large_upload_and_download_are_not_held_to_the_limit_of_requests(bare, tmp_path):
    await bare.start(files_dir=str(tmp_path / "files"), http_body_limit_mb=1)
    content = b"0123456789abcdef" * 2**20  # 16 MB, sixteen times what a JSON request may have
    response = await bare.client.post(
        "/v1/files", files={"file": ("large.jsonl", content)}, data={"purpose": "batch"}
    )
    file = response.json()
    got = await bare.client.get(f"/v1/files/{file['id']}/content")

    assert (file["bytes"], file["filename"]) == (len(content), "large.jsonl")
    assert got.content == content


async def test_file_that_is_deleted_during_its_download_arrives_whole(bare, tmp_path):
    await bare.start(files_dir=str(tmp_path / "files"))
    content = b"0123456789abcdef" * 2**20
    response = await bare.client.post(
        "/v1/files", files={"file": ("large.jsonl", content)}, data={"purpose": "batch"}
    )
    path = f"/v1/files/{response.json()['id']}"
    async with bare.client.stream("GET", f"{path}/content") as answer:
        pieces = answer.aiter_bytes()
        got = bytearray(await anext(pieces))
        deleted = await bare.client.delete(path)
        async for piece in pieces:
            got += piece

    assert deleted.status_code == 200
    assert got == content
