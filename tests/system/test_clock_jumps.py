"""The wall clock jumps an hour ahead, and two back: leases, time limits and streams go by another one."""

import datetime
import email.utils
import pathlib

import httpx
import mixes
import pytest
from deployment import MODEL

from waiting import PATIENT_S, eventually

FAKE = sorted(pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
SHARED = pathlib.Path("/dev/shm")
HOUR_S = 3600
WATCHED_S = (
    3.5  # the jump is seen after up to 2 s; then several looks at the leases, and heartbeats
)


@pytest.fixture
def set_clock(deployment, tmp_path):
    """Moves the wall clock of all processes, so many seconds from the true one."""
    if not FAKE:
        pytest.skip("libfaketime is not installed: as root on Debian, tests/install_services.sh")
    offset = tmp_path / "offset"
    deployment.environ |= {
        "LD_PRELOAD": str(FAKE[0]),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_CACHE_DURATION": "1",  # else each look at the clock reads the file, at every start of a process
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # as Linux does: that clock never jumps
        "NO_FAKE_STAT": "1",
    }

    def set_to(offset_s):
        new = tmp_path / "new offset"
        new.write_text(f"{offset_s:+d}")
        new.rename(offset)

    set_to(0)
    yield set_to
    for path in SHARED.glob("*faketime_*"):  # which libfaketime leaves
        path.unlink()


def ahead_s(frontend):
    """By how much its wall clock differs from ours."""
    said = httpx.get(f"{frontend.url}/live", timeout=PATIENT_S).headers["date"]
    now = datetime.datetime.now(datetime.UTC)
    return (email.utils.parsedate_to_datetime(said) - now).total_seconds()


def num_workers(frontend):
    return frontend.metric(f'dynamo_frontend_model_workers{{model="{MODEL}"}}')


@pytest.mark.parametrize("mix", ["file+tcp+zmq", "etcd+nats+nats"])
def test_jump_of_the_wall_clock_changes_no_answer(deployment, tmp_path, set_clock, mix):
    with mixes.running(mix, deployment, tmp_path):
        workers = [deployment.mocker("--tick-ms", "10") for _ in range(2)]
        frontend = deployment.frontend()
        eventually(
            lambda: frontend.is_live() and num_workers(frontend) == 2,
            what="two workers",
        )
        processes = (frontend, *workers)
        lengths = [len(process.log.read_text()) for process in processes]
        for offset_s in (HOUR_S, -HOUR_S, 0):
            with frontend.stream(max_tokens=int(WATCHED_S * 100), ignore_eos=True) as lines:
                next(lines)
                set_clock(offset_s)
                rest = list(lines)

            assert abs(ahead_s(frontend) - offset_s) < 60
            assert rest[-1] == "[DONE]"
            assert num_workers(frontend) == 2
            assert frontend.chat(max_tokens=2).status_code == 200

        logs = [
            process.log.read_text()[length:]  # a slow start may warn, of itself
            for process, length in zip(processes, lengths, strict=True)
        ]
        assert not any("WARN" in log or "ERROR" in log for log in logs), logs
