"""What an operator may have written down of requests: an audit log (what was said) and a request trace (what it cost).

Both are off by default. The variables are the original's.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from dynamo.base import config, errors
from dynamo.observability import row_writer
from dynamo.preprocess import tokenize
from dynamo.runtime import component

_MILLISECONDS = 1000
_TRACE_STEM = "dynamo-request-trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig(component.RuntimeConfig):
    """Audit log and request trace."""

    audit_sinks: tuple[str, ...] = config.option(
        (),
        env="DYN_AUDIT_SINKS",
        help="write what was asked and answered to these: stderr, jsonl, jsonl_gz",
    )
    audit_output_path: str | None = config.option(
        None, env="DYN_AUDIT_OUTPUT_PATH", help="the audit log's file, without its suffix"
    )
    audit_force_logging: bool = config.option(
        False,
        env="DYN_AUDIT_FORCE_LOGGING",
        help="write every request; by default only those with `store: true`",
    )
    audit_capacity: int = config.option(
        1024, env="DYN_AUDIT_CAPACITY", help="rows that may wait; more are dropped", least=1
    )
    audit_jsonl_buffer_bytes: int = config.option(
        2**20,
        env="DYN_AUDIT_JSONL_BUFFER_BYTES",
        help="bytes after which rows are written",
        least=1,
    )
    audit_jsonl_flush_interval_ms: int = config.option(
        1000, env="DYN_AUDIT_JSONL_FLUSH_INTERVAL_MS", help="how long rows may wait", least=1
    )
    audit_jsonl_gz_roll_bytes: int = config.option(
        2**28, env="DYN_AUDIT_JSONL_GZ_ROLL_BYTES", help="begin a new file after these", least=0
    )
    audit_jsonl_gz_roll_lines: int = config.option(
        0, env="DYN_AUDIT_JSONL_GZ_ROLL_LINES", help="likewise; 0: no limit", least=0
    )
    request_trace: bool = config.option(
        False,
        env="DYN_REQUEST_TRACE",
        help="write when requests came, how long they were and what their blocks are called",
    )
    request_trace_sinks: tuple[str, ...] = config.option(
        ("jsonl_gz",), env="DYN_REQUEST_TRACE_SINKS", help="to these: stderr, jsonl, jsonl_gz"
    )
    request_trace_output_path: str | None = config.option(
        None,
        env="DYN_REQUEST_TRACE_OUTPUT_PATH",
        help=f"its file, without its suffix (default: {_TRACE_STEM} in the directory for temporary files)",
    )
    request_trace_capacity: int = config.option(
        1024, env="DYN_REQUEST_TRACE_CAPACITY", help="rows that may wait; more are dropped", least=1
    )
    request_trace_jsonl_buffer_bytes: int = config.option(
        2**20,
        env="DYN_REQUEST_TRACE_JSONL_BUFFER_BYTES",
        help="bytes after which rows are written",
        least=1,
    )
    request_trace_jsonl_flush_interval_ms: int = config.option(
        1000,
        env="DYN_REQUEST_TRACE_JSONL_FLUSH_INTERVAL_MS",
        help="how long rows may wait",
        least=1,
    )
    request_trace_jsonl_gz_roll_bytes: int = config.option(
        2**28,
        env="DYN_REQUEST_TRACE_JSONL_GZ_ROLL_BYTES",
        help="begin a new file after these",
        least=0,
    )

    @property
    def audit_options(self) -> row_writer.RowOptions:
        """Of the audit log; without sinks there is none."""
        path = self.audit_output_path
        return row_writer.RowOptions(
            variable="DYN_AUDIT_SINKS",
            sinks=self.audit_sinks,
            path=Path(path) if path is not None else None,
            capacity=self.audit_capacity,
            buffer_bytes=self.audit_jsonl_buffer_bytes,
            flush_s=self.audit_jsonl_flush_interval_ms / _MILLISECONDS,
            roll_bytes=self.audit_jsonl_gz_roll_bytes,
            roll_lines=self.audit_jsonl_gz_roll_lines,
        )

    @property
    def request_trace_options(self) -> row_writer.RowOptions:
        """Of the request trace; without sinks there is none."""
        path = self.request_trace_output_path or Path(tempfile.gettempdir(), _TRACE_STEM)
        return row_writer.RowOptions(
            variable="DYN_REQUEST_TRACE_SINKS",
            sinks=self.request_trace_sinks if self.request_trace else (),
            path=Path(path),
            capacity=self.request_trace_capacity,
            buffer_bytes=self.request_trace_jsonl_buffer_bytes,
            flush_s=self.request_trace_jsonl_flush_interval_ms / _MILLISECONDS,
            roll_bytes=self.request_trace_jsonl_gz_roll_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(RecordConfig):
    """Who may come in, and when."""

    api_keys_file: str | None = config.option(
        None, env="DYN_API_KEYS_FILE", help="TOML file of API keys and their limits: ask for a key"
    )
    active_decode_blocks_threshold: float | None = config.option(
        None,
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        aliases=("--busy-threshold",),
        help="a worker is busy while more than this share of its KV blocks is active",
        least=0,
        most=1,
    )
    active_prefill_tokens_threshold: int | None = config.option(
        None,
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        help="a worker is busy while it has more prompt tokens to compute",
        least=0,
    )
    active_prefill_tokens_threshold_frac: float | None = config.option(
        None,
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        help="the same, as a multiple of its max_num_batched_tokens",
        least=0,
    )
    rejection_frontend_request_concurrency_limit: int | None = config.option(
        None,
        env="DYN_REJECTION_FRONTEND_REQUEST_CONCURRENCY_LIMIT",
        help="requests for one model that may run at the same time",
        least=1,
    )
    queue_limit: int = config.option(
        0,
        env="DYN_QUEUE_LIMIT",
        help="requests for one model that wait for room, instead of being refused at once",
        least=0,
    )
    queue_timeout_secs: float = config.option(
        10.0, env="DYN_QUEUE_TIMEOUT_SECS", help="how long a request waits for room", least=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(AdmissionConfig):
    """The OpenAI-compatible HTTP door: finds workers, and passes requests to them."""

    http_host: str = config.option(
        "127.0.0.1", env="DYN_HTTP_HOST", help="address to listen on; 0.0.0.0 for all networks"
    )
    http_port: int = config.option(
        8000, env="DYN_HTTP_PORT", help="port to listen on; 0: any", least=0, most=65535
    )
    http_workers: int = config.option(
        1,
        env="DYN_HTTP_WORKERS",
        help="processes that answer at the port; each uses one core",
        least=1,
        most=256,
    )
    http_worker_socket: str | None = config.option(
        None, help="where the other processes of --http-workers ask this one; their parent sets it"
    )
    namespace: str = config.option(
        "", env="DYN_NAMESPACE", help="serve only the models of this namespace; by default all"
    )
    tls_cert_path: str | None = config.option(
        None, env="DYN_TLS_CERT_PATH", help="certificate chain (PEM): serve https"
    )
    tls_key_path: str | None = config.option(
        None, env="DYN_TLS_KEY_PATH", help="private key (PEM) of the certificate"
    )
    kserve_grpc_server: bool = config.option(
        False,
        env="DYN_KSERVE_GRPC_SERVER",
        help="serve KServe's v2 protocol over gRPC too; its HTTP form is always there",
    )
    kserve_grpc_port: int = config.option(
        8001,
        env="DYN_KSERVE_GRPC_PORT",
        help="port of the gRPC server; 0: any",
        least=0,
        most=65535,
    )
    tls_client_ca_cert_path: str | None = config.option(
        None,
        env="DYN_TLS_CLIENT_CA_CERT_PATH",
        aliases=("--tls-client-ca-path",),
        help="authority (PEM) whose certificates clients must show",
    )
    metrics_prefix: str = config.option(
        "dynamo_frontend", env="DYN_METRICS_PREFIX", help="first part of every metric's name"
    )
    http_body_limit_mb: int = config.option(
        64,
        env="DYN_HTTP_BODY_LIMIT_MB",
        help="largest request body; the original allows 192",
        least=1,
    )
    http_read_timeout_secs: float = config.option(
        60.0,
        env="DYN_HTTP_READ_TIMEOUT_SECS",
        help="within what time a request must have arrived, once begun",
        least=0.1,
    )
    tokenizer_cache_mb: int = config.option(
        tokenize.CACHE_BYTES // 2**20,
        env="DYN_TOKENIZER_CACHE_MB",
        help="memory per model for the tokens of prompts' turns, so that only new ones are tokenized; 0: none",
        least=0,
    )
    model_cache: str | None = config.option(
        None,
        env="DYN_MODEL_CACHE",
        help="directory for tokenizers and templates of models that lie on other hosts (default: in the user's cache)",
    )
    response_store_items: int = config.option(
        10_000,
        env="DYN_RESPONSE_STORE_ITEMS",
        help="answers of /v1/responses that are kept to go on from; 0: none",
    )
    response_store_mb: int = config.option(
        64, env="DYN_RESPONSE_STORE_MB", help="memory for the answers that are kept"
    )
    request_timeout_secs: float = config.option(
        3600.0,
        env="DYN_REQUEST_TIMEOUT_SECS",
        help="an answer that is not complete by then ends with an error; 0: no limit",
        least=0,
    )
    migration_limit: int = config.option(
        3,
        env="DYN_MIGRATION_LIMIT",
        help="how often a request goes on at another worker when its own is lost; 0: never",
        least=0,
    )
    migration_max_seq_len: int | None = config.option(
        None,
        env="DYN_MIGRATION_MAX_SEQ_LEN",
        help="not if prompt and answer have more tokens than this, which would be computed again",
        least=1,
    )
    migration_wait_secs: float = config.option(
        5.0,
        env="DYN_MIGRATION_WAIT_SECS",
        help="how long it then waits for a worker, if there is none",
        least=0,
    )
    http_graceful_shutdown_timeout_secs: float = config.option(
        5.0,
        env="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        help="after SIGTERM, how long running answers may take to finish",
        least=0,
    )

    def check(self) -> None:
        """What the types cannot say. Raises ConfigError."""
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise errors.ConfigError(
                "--tls-cert-path and --tls-key-path: expected both or neither, got one of them"
            )
        if self.kserve_grpc_server and self.http_workers > 1 and not self.kserve_grpc_port:
            raise errors.ConfigError(
                "--kserve-grpc-port: expected a port that all processes of --http-workers share, got 0"
            )
        row_writer.check_options(self.audit_options)
        row_writer.check_options(self.request_trace_options)
        if self.tls_client_ca_cert_path is not None and self.tls_cert_path is None:
            raise errors.ConfigError(
                "--tls-client-ca-cert-path: clients show certificates only to a server that has one: "
                "add --tls-cert-path and --tls-key-path"
            )
