"""What a user may set of the way by which prompts' blocks go between workers, whichever engine computes them."""

from dataclasses import dataclass

from dynamo.base import config, membership


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(membership.ClusterConfig):
    """An engine's own settings inherit this."""

    kv_transfer_backends: tuple[str, ...] = config.option(
        ("shm", "tcp"),
        help="ways by which prompts' blocks may go between workers; the first that both have is taken",
    )
    kv_transfer_host: str | None = config.option(
        None,
        help="address by which workers of other hosts reach our blocks (default: --tcp-rpc-host)",
    )
    kv_transfer_timeout_s: float = config.option(
        5.0,
        help="seconds that a copy of a prompt's blocks may take before the prompt is computed here",
        least=0.01,
    )
    kv_hold_s: float = config.option(
        60.0,
        help="seconds that a prefill worker keeps a prompt's blocks for who asked for it; more than a prefill may take",
        least=0.01,
    )
