"""Settings that a process makes of itself when it starts: garbage collection, open files, signals, DYN_ variables.

By default Python looks for cycles of unused objects after every 700 new objects. With 64 requests in flight, each some
dozens of living objects, that finds nothing and took a sixth of a frontend's time. Reference counting frees what a
request leaves behind; only a few small cycles remain, which may wait for ten thousand new objects.

Each connection is an open file, and Linux allows 1,024 until a process asks for more. The low number protects programs
that use `select`; an event loop on epoll may ask for all that the system grants. Beyond the limit a server cannot even
accept a connection to refuse it, nor reach a worker.

Variables with names that begin with DYN_ are checked, so that a mistyped one is not ignored in silence. A process
declares only the options of its own part, but may be started with the variables of all parts.
"""

import asyncio
import atexit
import contextlib
import ctypes
import difflib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from dynamo.base import errors

RESERVED_FILES = 200  # for connections to workers, the planes, logs and libraries
_YOUNG_OBJECTS = 10_000  # some MB, until they are looked through
_OLDER_EVERY = 20
_OLDEST_EVERY = 50


def collect_garbage_rarely() -> None:
    """Tune garbage collection for many requests in flight.

    Call it when the modules of the process are loaded: objects that exist then are never looked at again.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_EVERY, _OLDEST_EVERY)


def reserve_open_files(num_connections: int) -> int:
    """Raise this process's limit of open files as far as needed and allowed; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return max(1, min(num_connections, soft - RESERVED_FILES))


def stop_on_signals(event: asyncio.Event | None = None) -> asyncio.Event:
    """Return `event`, or a new one, which the first SIGTERM or SIGINT sets; the second one ends the process at once."""
    stop = event or asyncio.Event()

    def handle_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle_signal, number)
    return stop


def run_command(
    prog: str,
    action: Callable[[], int | None],
    *,
    expected: type[errors.DynamoError] = errors.ConfigError,
) -> int:
    """Do what a command is for, and return its exit status: that of `action`, or 0.

    An error of the type `expected` is one sentence on standard error, with status 2 for wrong settings and 1 for the
    rest; Ctrl-C ends with 130. Any other error is a bug and leaves with its trace.
    """
    try:
        return action() or 0
    except expected as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2 if isinstance(error, errors.ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def end_now(exit_code: int) -> NoReturn:
    """End this process with its exit handlers, but without Python's last look at every object.

    After a large library such as torch was imported, that look takes seconds.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed at the start
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(exit_code)


_PR_SET_PDEATHSIG = 1


def dies_with(parent: int) -> Callable[[], None] | None:
    """Return what a new child calls to be killed with its parent; None where the kernel does not offer it."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


PREFIX = "DYN_"
_NAMES = """
DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC
DYN_ALLOWED_HOSTS DYN_API_KEY DYN_API_KEYS_FILE DYN_AUDIT_CAPACITY DYN_AUDIT_FORCE_LOGGING DYN_AUDIT_JSONL_BUFFER_BYTES
DYN_AUDIT_JSONL_FLUSH_INTERVAL_MS DYN_AUDIT_JSONL_GZ_ROLL_BYTES DYN_AUDIT_JSONL_GZ_ROLL_LINES DYN_AUDIT_OUTPUT_PATH
DYN_AUDIT_SINKS DYN_BATCH_CONCURRENCY DYN_CANARY_WAIT_TIME
DYN_CLUSTER_TLS_CA_CERT_PATH DYN_CLUSTER_TLS_CERT_PATH DYN_CLUSTER_TLS_KEY_PATH DYN_CLUSTER_TOKEN
DYN_CLUSTER_TOKEN_FILE DYN_CORS_ALLOW_ORIGIN DYN_CUSTOM_JINJA_TEMPLATE DYN_DECODE_FALLBACK DYN_DEFAULT_THINKING_MODE
DYN_DISCOVERY_BACKEND
DYN_ENFORCE_DISAGG DYN_ETCD_START_TIMEOUT_SECS DYN_EVENT_ADVERTISE DYN_EVENT_HOST DYN_EVENT_PLANE DYN_EVENT_PORT
DYN_FILES_DIR DYN_FILES_LIMIT_GB DYN_FILE_KV
DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS DYN_HEALTH_CHECK_ENABLED DYN_HEALTH_CHECK_REQUEST_TIMEOUT DYN_HTTP_BODY_LIMIT_MB
DYN_HTTP_BODY_MEMORY_MB DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS DYN_HTTP_HOST DYN_HTTP_PORT DYN_HTTP_READ_TIMEOUT_SECS
DYN_HTTP_WORKERS DYN_INFILL_FORMAT DYN_INHIBITED_DURATION_SECS DYN_INSECURE DYN_KSERVE_GRPC_PORT DYN_KSERVE_GRPC_SERVER
DYN_KVBM_CPU_CACHE_GB DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS DYN_KVBM_DISK_CACHE_DIR DYN_KVBM_DISK_CACHE_GB
DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS DYN_KVBM_OBJECT_NUM_BLOCKS DYN_KVBM_OBJECT_STORE DYN_KVBM_SHARED_MEMORY_DIR
DYN_KVBM_SHARING_WORKERS DYN_KV_CACHE_BLOCK_SIZE
DYN_KV_PEER_PREFIXES DYN_KV_TRANSFER_ADVERTISE DYN_KV_TRANSFER_HOST DYN_KV_TRANSFER_PORT DYN_LAUNCH_TOKENS DYN_LOG
DYN_LOGGING_CONFIG_PATH DYN_LOGGING_JSONL DYN_LOG_USE_LOCAL_TZ DYN_METRICS_PREFIX DYN_MIGRATION_LIMIT
DYN_MIGRATION_MAX_SEQ_LEN DYN_MODEL_CACHE DYN_NAMESPACE DYN_NATS_START_TIMEOUT_SECS
DYN_PARENT_DGD_K8S_NAME DYN_PARENT_DGD_K8S_NAMESPACE
DYN_PLANNER_FRONTEND_URL DYN_PLANNER_HOST DYN_PREFILL_QUEUE DYN_QUEUE_LIMIT DYN_QUEUE_TIMEOUT_SECS
DYN_REASONING_FIELD_NAME DYN_REASONING_PARSER DYN_REJECTION_FRONTEND_REQUEST_CONCURRENCY_LIMIT DYN_REQUEST_PLANE
DYN_REQUEST_PLANE_OUTAGE_SECS DYN_REQUEST_SILENCE_SECS DYN_REQUEST_TIMEOUT_SECS DYN_REQUEST_TRACE
DYN_REQUEST_TRACE_CAPACITY DYN_REQUEST_TRACE_JSONL_BUFFER_BYTES DYN_REQUEST_TRACE_JSONL_FLUSH_INTERVAL_MS
DYN_REQUEST_TRACE_JSONL_GZ_ROLL_BYTES DYN_REQUEST_TRACE_OUTPUT_PATH DYN_REQUEST_TRACE_SINKS DYN_RESPONSE_STORE_ITEMS
DYN_RESPONSE_STORE_MB
DYN_ROUTER_APPROXIMATE_CACHE_POLICY DYN_ROUTER_CONDITIONAL_DISAGG DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG
DYN_ROUTER_DISK_CACHE_HIT_WEIGHT DYN_ROUTER_HOST_CACHE_HIT_WEIGHT DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT
DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT DYN_ROUTER_LOCALITY DYN_ROUTER_MAX_TREE_SIZE DYN_ROUTER_MODE DYN_ROUTER_POLICY
DYN_ROUTER_PRUNE_TARGET_RATIO DYN_ROUTER_QUEUE_POLICY DYN_ROUTER_QUEUE_SIZE DYN_ROUTER_QUEUE_THRESHOLD
DYN_ROUTER_QUEUE_TIMEOUT_SECS DYN_ROUTER_REPLICA_SYNC DYN_ROUTER_SESSION_AFFINITY_TTL_SECS DYN_ROUTER_TEMPERATURE
DYN_ROUTER_TTL_SECS DYN_ROUTER_USE_KV_EVENTS DYN_SDK_DISABLE_ANSI_LOGGING DYN_SEMANTIC_ADMIN_KEY_FILE DYN_SEMANTIC_HOST
DYN_SEMANTIC_ROUTER DYN_START_ESTIMATE_S DYN_SYSTEM_ENABLED DYN_SYSTEM_HOST DYN_SYSTEM_PORT
DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS DYN_TCP_RPC_ADVERTISE DYN_TCP_RPC_HOST DYN_TCP_RPC_PORT DYN_TLS_CERT_PATH
DYN_TLS_CLIENT_CA_CERT_PATH DYN_TLS_KEY_PATH DYN_STARTUP_STALL_TIMEOUT DYN_TOKENIZER DYN_TOKEN_ECHO_DELAY_MS
DYN_TOKENIZER_CACHE_MB DYN_TOOL_CALL_PARSER DYN_UNKNOWN_PARAMETERS DYN_USAGE_FILE DYN_VLLM_NIXL_PAUSE_US DYN_VLLM_OWNED
DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT DYN_WORKER_WAIT_LIMIT DYN_WORKER_WAIT_SECS
"""
KNOWN = frozenset(_NAMES.split())


def describe_unknown(environ: Mapping[str, str]) -> str | None:
    """Return a sentence that names the variables that nothing here reads; None if there are none."""
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN)
    if not unknown:
        return None
    hints = [
        f"{name} (did you mean {similar[0]}?)"
        if (similar := difflib.get_close_matches(name, sorted(KNOWN), n=1, cutoff=0.8))
        else name
        for name in unknown
    ]
    return f"variables that nothing here reads: {', '.join(hints)}; docs/reference.md lists the known ones"
