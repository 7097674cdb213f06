"""The settings of the planner; flags of the original keep their names.

`--config` takes the fields of its `PlannerConfig` (Dynamo 1.x) as well:

    enable_throughput_scaling         --policy predictive, which looks at the queue, too
    enable_load_scaling               --policy regression, if the former is false
    throughput_adjustment_interval    --adjustment-interval
    load_adjustment_interval          the same, and the one that counts if both ways to scale are enabled
    optimization_target               --policy load, unless it is sla, which leaves the policy to the fields above
    advisory, no_operation            --no-operation
    no_correction                     --no-correction
    ttft_ms, itl_ms                   --ttft, --itl
    …_interval_seconds                …_interval
    metric_pulling_prometheus_endpoint, metric_reporting_prometheus_port   --prometheus-url, --planner-port
    mode, ttft, itl and others        the option of that name

Fields of its reports, of its predictors and of its sweeps before a deployment have no effect, and the log says so.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

from dynamo.base import config, errors
from dynamo.planner import policies, predictive_policy, predictors, regression_policy
from dynamo.runtime import component

Backend = Literal["native", "mocker", "vllm", "sglang", "trtllm", "llamacpp"]
_LEAST_TTFT_MS, _LEAST_ITL_MS = 10.0, 1.0
_UNITS_MS = {"ms": 1.0, "s": 1000.0}


def parse_duration_s(text: str, flag: str, least_ms: float) -> float:
    """Return the seconds of a target in milliseconds, or with a unit (`0.5s`, `500ms`). Raises ConfigError.

    A bare number below `least_ms` is refused: the original counts these targets in seconds in some of its tools.
    """
    unit = next((unit for unit in _UNITS_MS if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise errors.ConfigError(f"{flag} {text}: expected milliseconds, such as 500, or 0.5s")
    if not unit and number < least_ms:
        likely = f"{number * 1000:g}"
        raise errors.ConfigError(
            f"{flag} {text}: {likely}, not {text}: milliseconds (write {text}ms if it is meant)"
        )
    return number * _UNITS_MS.get(unit, 1.0) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Targets, limits and policy."""

    mode: Literal["agg", "disagg", "auto", "prefill", "decode"] = config.option(
        "agg",
        help="workers that are scaled: agg (all do both), disagg (both pools), auto (agg or disagg, whichever needs"
        " fewer GPUs; with --policy predictive), or one pool of a disaggregated model",
    )
    policy: Literal["load", "regression", "predictive", "sla"] = config.option(
        "load",
        help="load: thresholds of cache usage and queue; regression: targets, by the times of forward passes that the"
        " workers report; predictive: traffic one start-up ahead, needs a profile;"
        " sla: the formula of Dynamo 0.4.1, needs a profile",
    )
    isl: int = config.option(
        3000,
        help="expected prompt tokens, to say at the start whether the targets can be met",
        least=1,
    )
    osl: int = config.option(150, help="expected tokens of an answer, as for --isl", least=1)
    ttft: str = config.option(
        "500", help="target time to first token: milliseconds, or with a unit (0.5s)"
    )
    itl: str = config.option(
        "50", help="target time between two tokens: milliseconds, or with a unit"
    )
    adjustment_interval: float = config.option(
        10.0,
        help="seconds between two decisions; less reacts sooner and scales more often",
        least=0.05,
    )
    max_gpu_budget: int = config.option(
        8, help="most GPUs of all workers, those that start or drain included", least=1
    )
    min_endpoint: int = config.option(
        1,
        help="least workers of each pool; 0: down to none, for which --model-name is needed",
        least=0,
    )
    max_workers: int = config.option(1_000_000, help="most workers of each pool", least=1)
    prefill_engine_num_gpu: int = config.option(1, help="GPUs of one prefill worker", least=1)
    decode_engine_num_gpu: int = config.option(
        1, help="GPUs of one decode or aggregated worker", least=1
    )
    profile_results_dir: str = config.option(
        "profiling_results", help="directory of the profile, as python -m dynamo.profiler writes it"
    )
    load_predictor: Literal["constant", "moving-average", "arima", "kalman", "seasonal"] = (
        config.option("seasonal", help="predictor of the traffic, for predictive and sla")
    )
    load_prediction_window_size: int = config.option(
        predictors.DEFAULT_WINDOW, help="intervals that the predictor looks back", least=2
    )
    correction: bool = config.option(
        True, help="predictive and sla: correct the profile by what is measured in service"
    )
    startup_time: float = config.option(
        60.0,
        help="seconds from the order of a worker to readiness, until one is measured",
        least=0.1,
    )
    scale_down_delay: float = config.option(
        -1.0,
        help="seconds for which fewer workers must suffice before one goes; -1: one start-up time and one interval,"
        " up to half less with policy predictive and predictor seasonal: its forecasts hold the recent peak",
        least=-1,
    )
    decode_kv_scale_up_threshold: float = config.option(
        0.9,
        help="load: share of the KV cache in use above which a worker is added",
        least=0,
        most=1,
    )
    decode_kv_scale_down_threshold: float = config.option(
        0.5, help="load: share below which a worker goes", least=0, most=1
    )
    prefill_queue_scale_up_threshold: float = config.option(
        0.5, help="load: prompts waiting per worker above which a worker is added", least=0
    )
    prefill_queue_scale_down_threshold: float = config.option(
        0.2, help="load: prompts waiting per worker below which a worker goes", least=0
    )
    load_scaling_down_sensitivity: float = config.option(
        80.0,
        help="regression: percent of a target that the workers which remain must hold",
        least=1,
        most=100,
    )
    load_min_observations: int = config.option(
        5, help="regression: forward passes that must have been reported before it scales", least=2
    )
    max_num_fpm_samples: int = config.option(
        64, help="regression: forward passes that it keeps", least=2
    )
    fpm_sample_bucket_size: int = config.option(
        16, help="regression: passes of about equally many tokens that it keeps", least=1
    )
    operation: bool = config.option(
        True, help="carry decisions out; --no-operation only logs and shows them"
    )

    def check(self) -> None:
        """Raise ConfigError for limits that contradict each other."""
        if self.min_endpoint > self.max_workers:
            raise errors.ConfigError(
                f"--min-endpoint {self.min_endpoint}: expected at most --max-workers {self.max_workers}"
            )
        gpus = 0 if self.mode == "prefill" else self.decode_engine_num_gpu
        if self.mode in ("disagg", "prefill"):
            gpus += self.prefill_engine_num_gpu
        if gpus > self.max_gpu_budget:
            raise errors.ConfigError(
                f"--max-gpu-budget {self.max_gpu_budget}: expected at least {gpus}, for one worker of each pool in"
                f" mode {self.mode}"
            )
        if self.min_endpoint * gpus > self.max_gpu_budget:
            raise errors.ConfigError(
                f"--min-endpoint {self.min_endpoint}: needs {self.min_endpoint * gpus} GPUs in mode {self.mode},"
                f" expected at most --max-gpu-budget {self.max_gpu_budget}"
            )
        limits = self.thresholds
        for name, down, up in (
            ("decode-kv", limits.decode_kv_scale_down, limits.decode_kv_scale_up),
            ("prefill-queue", limits.prefill_queue_scale_down, limits.prefill_queue_scale_up),
        ):
            if down > up:
                raise errors.ConfigError(
                    f"--{name}-scale-down-threshold {down:g}: expected at most --{name}-scale-up-threshold {up:g}"
                )

    @property
    def targets(self) -> policies.Targets:
        """Return the targets. Raises ConfigError for values that cannot be milliseconds."""
        return policies.Targets(
            mode=self.mode,
            ttft_s=parse_duration_s(self.ttft, "--ttft", _LEAST_TTFT_MS),
            itl_s=parse_duration_s(self.itl, "--itl", _LEAST_ITL_MS),
            prefill_gpus=self.prefill_engine_num_gpu,
            decode_gpus=self.decode_engine_num_gpu,
        )

    @property
    def stabilization_s(self) -> float:
        """Return the seconds for which fewer workers must suffice before one goes."""
        if self.scale_down_delay >= 0 or self.policy != "predictive":
            return self.settle_s
        return predictive_policy.stabilization_s(
            self.load_predictor, self.startup_time, self.adjustment_interval
        )

    @property
    def settle_s(self) -> float:
        """Return the seconds for which another form of deployment must suffice before the planner takes it."""
        default_s = self.startup_time + self.adjustment_interval  # until a new worker could serve
        return default_s if self.scale_down_delay < 0 else self.scale_down_delay

    @property
    def regression(self) -> regression_policy.RegressionLimits:
        """Return the limits of scaling by forward passes."""
        return regression_policy.RegressionLimits(
            max_samples=self.max_num_fpm_samples,
            samples_of_bucket=self.fpm_sample_bucket_size,
            least_samples=self.load_min_observations,
            sensitivity=self.load_scaling_down_sensitivity / 100,
        )

    @property
    def thresholds(self) -> policies.LoadThresholds:
        return policies.LoadThresholds(
            decode_kv_scale_up=self.decode_kv_scale_up_threshold,
            decode_kv_scale_down=self.decode_kv_scale_down_threshold,
            prefill_queue_scale_up=self.prefill_queue_scale_up_threshold,
            prefill_queue_scale_down=self.prefill_queue_scale_down_threshold,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig(component.RuntimeConfig):
    """Scale the workers of a model: on this machine, on a cluster, or by an orchestrator that follows its targets."""

    environment: Literal["local", "kubernetes", "virtual"] = config.option(
        "local",
        help="local: worker processes on this machine; kubernetes: replicas of the DynamoGraphDeployment that this"
        " pod belongs to, the default in such a pod; virtual: targets in discovery for a foreign orchestrator",
        implied=("DYN_PARENT_DGD_K8S_NAME", "kubernetes"),
    )
    backend: Backend = config.option(  # noqa: RUF009 (a declaration)
        "mocker", help="local: engine of the workers"
    )
    model: str | None = config.option(
        None, help="local: model directory or hub name that the workers get as --model"
    )
    model_name: str | None = config.option(
        None, help="model whose traffic counts; without it, that of all models"
    )
    worker_flags: str = config.option(
        "",
        help='local: more flags for each worker, as one argument: "--max-num-seqs 64"',
        takes="text",
    )
    cores_per_worker: int = config.option(
        0, help="local: CPU cores that each worker gets for itself; 0: all share all", least=0
    )
    devices_per_worker: int = config.option(
        0, help="local: GPUs that each worker gets for itself; 0: all see all", least=0
    )
    frontend_url: tuple[str, ...] = config.option(
        ("http://127.0.0.1:8000",),
        env="DYN_PLANNER_FRONTEND_URL",
        help="frontends whose /metrics tell the traffic, comma-separated",
    )
    prometheus_url: str | None = config.option(
        None,
        aliases=("--metric-pulling-prometheus-endpoint",),
        help="Prometheus server to ask instead of the frontends; --adjustment-interval must be at least twice the time"
        " between its scrapes",
    )
    planner_host: str = config.option(
        "127.0.0.1", env="DYN_PLANNER_HOST", help="address of /planner/decisions and /metrics"
    )
    planner_port: int = config.option(
        9085,
        env="PLANNER_PROMETHEUS_PORT",
        help="port of /planner/decisions and /metrics; 0: a free one",
        least=0,
        most=65535,
    )
    log_dir: str | None = config.option(
        None, help="directory for decisions.jsonl, a line for each decision"
    )


_logger = logging.getLogger(__name__)
_FORMER_NAMES = {
    "throughput_adjustment_interval_seconds": "throughput_adjustment_interval",
    "load_adjustment_interval_seconds": "load_adjustment_interval",
    "metric_pulling_prometheus_endpoint": "prometheus_url",
    "metric_reporting_prometheus_port": "planner_port",
    "ttft_ms": "ttft",
    "itl_ms": "itl",
}
# What they set is learned from the workers, counted otherwise, or shown by /planner/decisions.
_WITHOUT_EFFECT_TABLE = """
kalman_min_points kalman_q_level kalman_q_trend kalman_r live_dashboard_port load_metric_samples
load_predictor_log1p load_predictor_warmup_trace pre_deployment_sweeping_mode prophet_window_size
report_interval_hours report_output_dir throughput_metrics_source
"""
_WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT_TABLE.split())
_OPPOSITES = {"advisory": "operation", "no_operation": "operation", "no_correction": "correction"}
_IS_ENABLED = {"enable_throughput_scaling": True, "enable_load_scaling": False}  # unless said
_INTERVAL_OF = {
    "enable_throughput_scaling": "throughput_adjustment_interval",
    "enable_load_scaling": "load_adjustment_interval",
}


def translate(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file with our names and values. Raises ConfigError for a value that none of ours has.

    What is null is left out, and so is what has no effect, which is logged.
    """
    present = {name: value for name, value in content.items() if value is not None}
    for former, ours in _FORMER_NAMES.items():
        if former in present and ours in present:
            raise errors.ConfigError(f"--config: expected {ours} or {former}, got both")
    for name in sorted(present.keys() & _WITHOUT_EFFECT):
        _logger.warning("--config: %s has no effect in this planner", name)
    options = _translate_policy(
        {_FORMER_NAMES.get(k, k): v for k, v in present.items() if k not in _WITHOUT_EFFECT}
    )
    for name, ours in _OPPOSITES.items():
        if name in options:
            options[ours] = not _read_bool(options, name)
            del options[name]
    for name in ("ttft", "itl"):
        if type(options.get(name)) in (int, float):
            options[name] = f"{options[name]:g}"
    return options


def _translate_policy(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the fields of the two ways to scale, which the original may run at once."""
    target = options.pop("optimization_target", "sla")
    if target not in ("throughput", "latency", "sla"):
        raise errors.ConfigError(
            f"--config: optimization_target: expected throughput, latency or sla, got {target!r}"
        )
    if target != "sla":  # thresholds of cache and queue, whatever else is said
        options = {name: value for name, value in options.items() if name not in _IS_ENABLED}
        options.setdefault("policy", "load")
        if (interval := options.pop("load_adjustment_interval", None)) is not None:
            options.setdefault("adjustment_interval", interval)
            options.pop("throughput_adjustment_interval", None)
    for ours, theirs in (("policy", _IS_ENABLED), ("adjustment_interval", _INTERVAL_OF.values())):
        if ours in options and (clash := sorted(options.keys() & set(theirs))):
            raise errors.ConfigError(f"--config: expected {ours} or {clash[0]}, got both")
    is_said = bool(options.keys() & _IS_ENABLED.keys())
    enabled = [
        name
        for name, default in _IS_ENABLED.items()
        if (_read_bool(options, name) if name in options else default)
    ]
    intervals = {
        name: options.pop(interval)
        for name, interval in _INTERVAL_OF.items()
        if interval in options
    }
    options = {name: value for name, value in options.items() if name not in _IS_ENABLED}
    if not enabled:
        raise errors.ConfigError(
            f"--config: expected one of {' and '.join(_IS_ENABLED)} to be true, got neither"
        )
    if is_said:
        is_by_throughput = "enable_throughput_scaling" in enabled
        options.setdefault("policy", "predictive" if is_by_throughput else "regression")
    if counted := [intervals[name] for name in enabled if name in intervals]:
        options.setdefault("adjustment_interval", counted[-1])
    return options


def _read_bool(options: dict[str, Any], name: str) -> bool:
    if type(options[name]) is not bool:
        raise errors.ConfigError(f"--config: {name}: expected true or false, got {options[name]!r}")
    return bool(options[name])
