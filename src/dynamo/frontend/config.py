"""The settings of a frontend: of its records (audit log, request trace), of admission, and of the server itself.

The names of the environment variables are the original's. Records and admission are off by default.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynamo.base import config, draining, errors, local_users
from dynamo.observability import row_writer
from dynamo.preprocess import tokenize
from dynamo.runtime import component
from dynamo.runtime.http import browsers

_MILLISECONDS = 1000
_TRACE_STEM = "dynamo-request-trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig(component.RuntimeConfig):
    """The settings of the audit log and the request trace."""

    audit_sinks: tuple[str, ...] = config.setting(
        (), help="write requests and responses to these audit logs: stderr, jsonl, jsonl_gz"
    )
    audit_output_path: str | None = config.setting(
        None, help="path of the audit log's file, without its suffix"
    )
    audit_force_logging: bool = config.setting(
        False, help="audit every request; by default only those with `store: true`"
    )
    audit_capacity: int = config.setting(
        1024, help="audit rows that may wait to be written; further rows are dropped", least=1
    )
    audit_jsonl_buffer_bytes: int = config.setting(
        2**20, help="bytes that are collected before they are written", least=1
    )
    audit_jsonl_flush_interval_ms: int = config.setting(
        1000, help="milliseconds after which audit rows are written, however few", least=1
    )
    audit_jsonl_gz_roll_bytes: int = config.setting(
        2**28, help="bytes after which the audit log begins a new file; 0: no limit", least=0
    )
    audit_jsonl_gz_roll_lines: int = config.setting(
        0, help="lines after which the audit log begins a new file; 0: no limit", least=0
    )
    request_trace: bool = config.setting(
        False,
        help="write a trace of requests for replays: arrival, lengths and block hashes, no text",
    )
    request_trace_sinks: tuple[str, ...] = config.setting(
        ("jsonl_gz",), help="where the request trace is written: stderr, jsonl, jsonl_gz"
    )
    request_trace_output_path: str | None = config.setting(
        None,
        help=f"path of the trace's file, without its suffix (default: {_TRACE_STEM} in the temporary directory)",
    )
    request_trace_capacity: int = config.setting(
        1024, help="trace rows that may wait to be written; further rows are dropped", least=1
    )
    request_trace_jsonl_buffer_bytes: int = config.setting(
        2**20, help="bytes that are collected before they are written", least=1
    )
    request_trace_jsonl_flush_interval_ms: int = config.setting(
        1000, help="milliseconds after which trace rows are written, however few", least=1
    )
    request_trace_jsonl_gz_roll_bytes: int = config.setting(
        2**28, help="bytes after which the request trace begins a new file; 0: no limit", least=0
    )

    @property
    def audit_options(self) -> row_writer.RowOptions:
        """Return the options of the audit log; without sinks there is none."""
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
        """Return the options of the request trace; without sinks there is none, nor a temporary directory."""
        sinks = self.request_trace_sinks if self.request_trace else ()
        default = Path(tempfile.gettempdir(), _TRACE_STEM) if sinks else None
        path = self.request_trace_output_path or default
        return row_writer.RowOptions(
            variable="DYN_REQUEST_TRACE_SINKS",
            sinks=sinks,
            path=Path(path) if path is not None else None,
            capacity=self.request_trace_capacity,
            buffer_bytes=self.request_trace_jsonl_buffer_bytes,
            flush_s=self.request_trace_jsonl_flush_interval_ms / _MILLISECONDS,
            roll_bytes=self.request_trace_jsonl_gz_roll_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(RecordConfig):
    """The settings of admission."""

    api_keys_file: str | None = config.setting(
        None, help="TOML file of API keys and their rate limits; with it every request needs a key"
    )
    active_decode_blocks_threshold: float | None = config.setting(
        None,
        aliases=("--busy-threshold",),
        help="share of a worker's KV blocks, 0 to 1, above which it is busy and gets no requests",
        least=0,
        most=1,
    )
    active_prefill_tokens_threshold: int | None = config.setting(
        None, help="prompt tokens still to be computed above which a worker is busy", least=0
    )
    active_prefill_tokens_threshold_frac: float | None = config.setting(
        None, help="prompt tokens above which a worker is busy, in max_num_batched_tokens", least=0
    )
    rejection_frontend_request_concurrency_limit: int | None = config.setting(
        None,
        help="requests of one model that may run at the same time; by default no limit",
        least=1,
    )
    queue_limit: int = config.setting(
        0,
        help="requests of one model that may wait for a permit instead of being refused at once; 0: none",
        least=0,
    )
    queue_timeout_secs: float = config.setting(
        10.0, help="seconds that a request waits for a permit before it is refused", least=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(AdmissionConfig):
    """An HTTP server with the OpenAI API and others, which finds workers and sends requests to them."""

    http_host: str = config.setting("127.0.0.1", help="address to listen on; 0.0.0.0: all networks")
    http_port: int = config.setting(8000, help="port to listen on; 0: any", least=0, most=65535)
    http_workers: int = config.setting(
        1,
        help="processes that share the port, each on one core; raise it when one core is not enough",
        least=1,
        most=256,
    )
    http_worker_socket: str | None = config.option(
        None,
        help="Unix socket at which other processes of --http-workers ask this one; set by their parent",
    )
    cors_allow_origin: tuple[str, ...] = config.setting((), help=browsers.ORIGINS_HELP)
    allowed_hosts: tuple[str, ...] = config.setting(
        (), help=f"{browsers.HOSTS_HELP}; not looked at where API keys are used"
    )
    unknown_parameters: Literal["accept", "refuse"] = config.setting(
        "accept",
        help="parameters that a request has and this server does not know: named in the header "
        "x-dynamo-ignored-parameters, or a 400",
    )
    reasoning_field_name: Literal["reasoning_content", "reasoning"] = config.setting(
        "reasoning_content",
        help="field in which answers of /v1/chat/completions have the thoughts of the model; clients of vLLM read "
        "`reasoning`",
    )
    namespace: str = config.setting(
        "",
        help="serve only the models of this namespace, and of its generations that an orchestrator makes (`-` and eight"
        " hexadecimal digits behind it); by default all",
    )
    tls_cert_path: str | None = config.setting(
        None, help="certificate chain (PEM); with it the server speaks HTTPS"
    )
    tls_key_path: str | None = config.setting(None, help="private key (PEM) of the certificate")
    kserve_grpc_server: bool = config.setting(
        False, help="serve KServe's v2 protocol over gRPC as well; over HTTP it is always served"
    )
    kserve_grpc_port: int = config.setting(
        8001, help="port of the gRPC server; 0: any", least=0, most=65535
    )
    tls_client_ca_cert_path: str | None = config.setting(
        None,
        aliases=("--tls-client-ca-path",),
        help="certificate authority (PEM) by which clients must be certified",
    )
    metrics_prefix: str = config.setting(
        "dynamo_frontend", help="first part of the name of every metric"
    )
    http_body_limit_mb: int = config.setting(
        8,
        help="largest request body, in MiB, four times as much for embeddings, scores, rankings; raise it for images",
        least=1,
    )
    http_body_memory_mb: int = config.setting(
        512,
        help="MiB for the bodies of all requests together; beyond it the largest that is still arriving is refused",
        least=1,
    )
    http_read_timeout_secs: float = config.setting(
        60.0, help="seconds within which a request must arrive completely", least=0.1
    )
    tokenizer: Literal["fastokens", "default"] = config.setting(
        "fastokens",
        help="library that turns prompts into tokens; a model for which fastokens gives other tokens than "
        "Hugging Face's tokenizers uses the latter, as all do with `default`",
    )
    tokenizer_cache_mb: int = config.setting(
        tokenize.CACHE_BYTES // 2**20,
        help="MiB per model for the tokens of earlier prompts, so that only new turns are tokenized; 0: none",
        least=0,
    )
    model_cache: str | None = config.setting(
        None,
        help="directory for tokenizer files fetched from other hosts (default: in the user's cache)",
    )
    response_store_items: int = config.setting(
        10_000,
        help="responses of /v1/responses that are stored, to be continued from; 0: none",
        least=0,
    )
    response_store_mb: int = config.setting(64, help="MiB of memory for stored responses", least=0)
    request_timeout_secs: float = config.setting(
        3600.0,
        help="seconds after which an incomplete response ends with an error; 0: no limit",
        least=0,
    )
    migration_limit: int = config.setting(
        3,
        help="times that a request migrates to another worker when its worker is lost; 0: never",
        least=0,
    )
    migration_max_seq_len: int | None = config.setting(
        None,
        help="tokens of prompt and output above which a request does not migrate, as they are computed again",
        least=1,
    )
    worker_wait_secs: float = config.setting(
        5.0,
        help="seconds that a request, new or migrating, waits for a worker if there is none; longer while one is known"
        " to be starting",
        least=0,
    )
    worker_wait_limit: int = config.setting(
        1000, help="new requests that may wait for a worker; more are refused at once", least=0
    )
    request_plane_outage_secs: float = config.setting(
        90.0,
        help="seconds that an answer which has begun waits while the NATS server of the request plane is away",
        least=0,
    )
    http_graceful_shutdown_timeout_secs: float = draining.FRONTEND.option(
        "seconds that running responses may take to finish after SIGTERM"
    )
    grace_period_s: float = draining.GRACE.option(
        "seconds after SIGTERM in which new requests are still taken, while /health says 503 already and a load"
        " balancer may not know it yet"
    )

    usage_file: str | None = config.setting(
        None,
        help="file in which the sums of /usage survive a restart, by default none; one for each frontend, and with"
        " --http-workers FILE.2 and so on beside it",
    )
    files_dir: str | None = config.setting(
        None,
        help="folder of this host for files and batches (/v1/files, /v1/batches), which the frontends of one namespace"
        " share (default: dynamo/files/NAMESPACE in XDG_STATE_HOME)",
    )
    files_limit_gb: float = config.setting(
        10.0, help="gigabytes that files may take together, uploaded or written by batches", least=0
    )
    batch_concurrency: int = config.setting(
        64, help="lines of batches that are answered at once", least=1
    )
    semantic_router: str | None = config.setting(
        None,
        help="configuration (YAML) of the semantic router, which chooses models by what requests say; by default none",
    )

    @property
    def files_folder(self) -> Path:
        """Return the folder of files and batches.

        A user without a home, as a container may have, has it among the temporary files. Raises ConfigError for one in
        the home of an unknown user, or that another user could change.
        """
        try:
            if self.files_dir:
                return Path(self.files_dir).expanduser()
            state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        except RuntimeError as error:
            if self.files_dir:
                raise errors.ConfigError(f"--files-dir {self.files_dir}: {error}") from error
            state = local_users.temporary_directory("state", "--files-dir")
        return state / "dynamo" / "files" / (self.namespace or "all")

    def check(self) -> None:
        """Check settings that depend on one another. Raises ConfigError."""
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise errors.ConfigError(
                "--tls-cert-path and --tls-key-path: expected both or neither, got one of them"
            )
        if self.kserve_grpc_server and self.http_workers > 1 and not self.kserve_grpc_port:
            raise errors.ConfigError(
                "--kserve-grpc-port: expected a port that all processes of --http-workers share, got 0"
            )
        browsers.check_origins(self.cors_allow_origin)
        if "*" in self.cors_allow_origin and self.api_keys_file:
            raise errors.ConfigError(
                "--cors-allow-origin *: with --api-keys-file expected the exact origins that may use the keys"
            )
        row_writer.check_options(self.audit_options)
        row_writer.check_options(self.request_trace_options)
        if self.tls_client_ca_cert_path is not None and self.tls_cert_path is None:
            raise errors.ConfigError(
                "--tls-client-ca-cert-path: clients show certificates only to a server that has one: "
                "add --tls-cert-path and --tls-key-path"
            )
