"""Closed-loop HTTP load for one OpenAI-compatible server, light enough not to be what is measured.

    load.py --url http://127.0.0.1:8100 --conc 128 --n 1024 --stream --osl 128 \
            --pids fe=123,mk=456 --tag ours:stream-c128

It is one asyncio.Protocol per connection (uvloop if installed), keep-alive, requests built beforehand, no JSON
parsed while it runs. It prints one JSON line: requests per second, latency, time to first token, time per token after
it (of each request the mean), SSE events per second, and the CPU seconds used by each named process tree and by this
process.

--prompts is a file with one item a line: a JSON string (one user message), {"messages": [...]}, or a list of token ids
(for /v1/completions), used in turn.
--pids is NAME=PID[+PID...],... ; the children of each pid are counted with it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import re
import time
import urllib.parse

try:
    import uvloop
except ImportError:
    uvloop = None

END = b"0\r\n\r\n"
# The first chunk that carries text: a role-only first chunk must not count as a token.
TEXT = re.compile(rb'"(?:content|text|reasoning_content)":\s*"[^"]')


def children(pid):
    """Of a process, those that live."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def tree(pid):
    """The pid and all its living descendants."""
    return [pid, *itertools.chain.from_iterable(map(tree, children(pid)))]


def cpu_seconds(pids):
    """Of their living threads, which servers keep: in nanoseconds, where /proc/PID/stat has hundredths of a second."""
    total = 0
    for pid in pids:
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(task.read_text().split()[0])
    return total / 1e9


def rss_mb(pids):
    kb = 0
    for pid in pids:
        try:
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        kb += next((int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS")), 0)
    return round(kb / 1024, 1)


class Run:
    """What all connections share."""

    def __init__(self, requests, total, conc, stream, fresh=False):
        self.requests, self.stream = itertools.cycle(requests), stream
        self.fresh, self.opening = fresh, set()
        self.total, self.issued, self.live = total, 0, conc
        self.latencies, self.first_texts, self.rests = [], [], []
        self.errors = self.events = self.bytes = 0
        self.last_error = None
        self.done = asyncio.get_running_loop().create_future()

    def leave(self):
        self.live -= 1
        if not self.live and not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    def __init__(self, run, door):
        self.run, self.door, self.busy = run, door, False
        self.asked = 0

    def connection_made(self, transport):
        self.transport = transport
        self.next()

    def next(self):
        run = self.run
        if run.issued >= run.total:
            self.transport.close()
            run.leave()
            return
        if run.fresh and self.asked:
            self.transport.close()
            run.opening.add(opening := asyncio.ensure_future(connect(run, self.door)))
            opening.add_done_callback(run.opening.discard)
            return
        self.asked += 1
        run.issued += 1
        self.head = self.first = None
        self.buffer, self.scanned = bytearray(), 0
        self.busy, self.start = True, time.perf_counter()
        self.transport.write(next(run.requests))

    def data_received(self, data):
        self.buffer += data
        if self.head is None and not self.read_head():
            return
        if self.run.stream and self.first is None:
            if TEXT.search(self.buffer, self.scanned):
                self.first = time.perf_counter() - self.start
            self.scanned = max(0, len(self.buffer) - 64)
        if self.buffer.endswith(END) if self.chunked else len(self.buffer) >= self.length:
            self.finish()

    def read_head(self):
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self.head = bytes(self.buffer[:end]).lower()
        del self.buffer[: end + 4]
        self.chunked = b"transfer-encoding: chunked" in self.head
        if not self.chunked:
            at = self.head.find(b"content-length:")
            self.length = int(self.head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if int(self.head[9:12]) != 200:
            self.run.errors += 1
            self.run.last_error = bytes(self.head[:40] + b" " + self.buffer[:300])
        return True

    def finish(self):
        run = self.run
        run.latencies.append(time.perf_counter() - self.start)
        if self.first is not None:
            run.first_texts.append(self.first)
            run.rests.append(run.latencies[-1] - self.first)
        run.bytes += len(self.buffer)
        if run.stream:
            run.events += self.buffer.count(b"data: ")
        self.busy = False
        self.next()

    def connection_lost(self, exc):
        if self.busy:
            self.busy = False
            self.run.errors += 1
            self.run.leave()


async def connect(run, door):
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: Connection(run, door), door.hostname, door.port or 80)


def percentiles_ms(values):
    values = sorted(values)
    return {
        name: round(1000 * values[min(len(values) - 1, int(q * len(values)))], 3)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    } | {"mean": round(1000 * sum(values) / len(values), 3)}


def question(item):
    """A dict is taken as it is, a text as a user's message, numbers as the tokens of a prompt (for /v1/completions)."""
    if isinstance(item, dict):
        return item
    return (
        {"prompt": item}
        if isinstance(item, list)
        else {"messages": [{"role": "user", "content": item}]}
    )


def build_requests(args, host, port):
    items = ["Say hello to the world please."]
    if args.prompts:
        with open(args.prompts, encoding="utf-8") as f:
            items = [json.loads(line) for line in f]
    requests = []
    for item in items:
        body = {"model": args.model, **question(item), "max_tokens": args.osl}
        if args.stream:
            body["stream"] = True
        body.update(json.loads(args.extra))
        data = json.dumps(body).encode()
        head = (
            f"POST {args.path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        requests.append(head.encode() + data)
    return requests


async def main(args):
    doors = [urllib.parse.urlsplit(url) for url in args.url.split(",")]
    host, port = doors[0].hostname, doors[0].port or 80
    run = Run(build_requests(args, host, port), args.n, args.conc, args.stream, args.fresh)
    named = dict(item.split("=", 1) for item in args.pids.split(",") if item)
    trees = {k: [p for pid in v.split("+") for p in tree(int(pid))] for k, v in named.items()}
    before = {k: cpu_seconds(pids) for k, pids in trees.items()}
    own, start = time.process_time(), time.perf_counter()
    for _, door in zip(range(args.conc), itertools.cycle(doors)):
        await connect(run, door)
    await run.done
    wall = time.perf_counter() - start
    cpu = {k: cpu_seconds(pids) - before[k] for k, pids in trees.items()}
    cpu["loadgen"] = time.process_time() - own
    n = len(run.latencies)
    if not n:
        raise SystemExit(f"no request finished; errors {run.errors}")
    out = {"tag": args.tag} if args.tag else {}
    out |= {"conc": args.conc, "n": n, "errs": run.errors, "wall_s": round(wall, 3)}
    out |= {"req_s": round(n / wall, 1), "lat_ms": percentiles_ms(run.latencies)}
    if run.first_texts:
        out |= {"ttft_ms": percentiles_ms(run.first_texts), "events": run.events}
        out["events_s"] = round(run.events / wall)
        out["itl_ms"] = percentiles_ms([rest / max(1, args.osl - 1) for rest in run.rests])
    out["MB"] = round(run.bytes / 1e6, 2)
    out["cpu_s"] = {k: round(v, 2) for k, v in cpu.items()}
    out["cpu_ms_per_req"] = {k: round(1000 * v / n, 3) for k, v in cpu.items()}
    if run.events:  # per token asked for, not per event seen: some tokens decode to no text
        out["cpu_ms_per_1k_tok"] = {k: round(1e6 * v / (n * args.osl), 2) for k, v in cpu.items()}
    out["rss_mb"] = {k: rss_mb(pids) for k, pids in trees.items()}
    if run.last_error:
        out["last_err"] = run.last_error.decode(errors="replace")
    print(json.dumps(out), flush=True)


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--url", default="http://127.0.0.1:8100", help="or several, comma-separated, used in turn"
    )
    p.add_argument("--path", default="/v1/chat/completions")
    p.add_argument("--model", default="m")
    p.add_argument(
        "--conc", type=int, default=1, help="connections, each with one request at a time"
    )
    p.add_argument("--n", type=int, default=100, help="requests in all")
    p.add_argument("--stream", action="store_true")
    p.add_argument("--fresh", action="store_true", help="a new connection for each request")
    p.add_argument("--osl", type=int, default=1, help="max_tokens of each request")
    p.add_argument("--prompts", help="JSON-lines file, see above")
    p.add_argument("--extra", default="{}", help="JSON object merged into every body")
    p.add_argument("--pids", default="", help="NAME=PID[+PID...],...")
    p.add_argument("--tag", help="SYSTEM:CELL, kept in the output line for summ.py")
    return p.parse_args()


if __name__ == "__main__":
    (uvloop.run if uvloop else asyncio.run)(main(arguments()))
