"""The logs of a service, by the name that users of NVIDIA Dynamo import: `configure_dynamo_logging`."""

import logging

from dynamo.observability import logs


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Send the logs of this process to standard error, as DYN_LOG says, those of its own modules too.

    Each message begins with `[service_name:worker_id]`, if one is given. Raises ConfigError for a bad setting.
    """
    logs.configure()
    root = logging.getLogger()
    root.setLevel(logging.getLogger("dynamo").level)
    watcher = logging.getLogger("watchfiles")  # it counts each change of our own files of discovery
    watcher.setLevel(watcher.level or logging.WARNING)
    prefix = ":".join(str(part) for part in (service_name, worker_id) if part is not None)
    if prefix:
        root.handlers[0].addFilter(lambda record: _put_first(record, f"[{prefix}] "))


def _put_first(record: logging.LogRecord, prefix: str) -> bool:
    record.msg = prefix.replace("%", "%%" if record.args else "%") + str(record.msg)
    return True
