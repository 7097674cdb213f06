"""The commands of engines: which engine a container runs, and how one replica is spread over several nodes."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from dynamo.base import errors

_MODULE = re.compile(r"python[0-9.]*\s(?:.*\s)?-m\s+dynamo\.(vllm|sglang|trtllm)\b", re.DOTALL)
_SHELL = ("/bin/sh", "-c")
LEADER = "$(LWS_LEADER_ADDRESS)"  # the variables that a LeaderWorkerSet sets in its pods
_RANK = "$(LWS_WORKER_INDEX)"
_RAY_PORT, _DIST_PORT = 6379, 29500


def detect_framework(container: dict[str, Any]) -> str | None:
    """Return the engine that the command of a container starts: vllm, sglang, trtllm or None."""
    match = _MODULE.search(join_command(container))
    return match[1] if match else None


def join_command(container: dict[str, Any]) -> str:
    """Return command and arguments of a container as one line of a shell."""
    words = [*container.get("command", ()), *container.get("args", ())]
    if len(words) > 2 and words[0].endswith("sh") and words[1] == "-c":
        return str(words[2])
    return shlex.join(words)


def as_shell(line: str) -> dict[str, Sequence[str]]:
    """Return command and arguments that run a line in a shell."""
    return {"command": list(_SHELL), "args": [line]}


def spread_over_nodes(
    container: dict[str, Any], framework: str | None, num_nodes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the container of the leader and that of the other nodes. Raises ConfigError for engines that cannot."""
    line = join_command(container)
    without_probes = {key: value for key, value in container.items() if not key.endswith("Probe")}
    if framework == "vllm":
        follow = f"ray start --address={LEADER}:{_RAY_PORT} --block"
        lead = f"ray start --head --port={_RAY_PORT} && {line}"
        return {**container, **as_shell(lead)}, {**without_probes, **as_shell(follow)}
    if framework == "sglang":
        flags = f"--dist-init-addr {LEADER}:{_DIST_PORT} --nnodes {num_nodes} --node-rank"
        lead, follow = f"{line} {flags} 0", f"{line} {flags} {_RANK}"
        return {**container, **as_shell(lead)}, {**without_probes, **as_shell(follow)}
    raise errors.ConfigError(
        f"multinode: the engine is {framework or 'unknown'}; expected `python3 -m dynamo.vllm` or"
        " `dynamo.sglang` in the command, whose nodes join by Ray and by --dist-init-addr"
    )
