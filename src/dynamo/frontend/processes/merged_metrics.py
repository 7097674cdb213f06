"""The metrics of several processes as one page: each sample says whose it is, and nothing is added up.

What is to be added up (counters, most gauges) and what is not (a model's context length) only the reader knows;
Prometheus adds by `sum without (http_worker)`.
"""

from collections.abc import Mapping

LABEL = "http_worker"


def merge(text_by_worker: Mapping[str, str]) -> str:
    """Expositions, by the process that they came from → one exposition."""
    comments: dict[str, dict[str, None]] = {}  # by family; each line once, in order
    samples: dict[str, list[str]] = {}
    for worker, text in text_by_worker.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):  # HELP or TYPE, the name, the rest
                family = line.split(" ", 3)[2]
                comments.setdefault(family, {})[line] = None
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = (line for name in comments for line in (*comments[name], *samples.get(name, ())))
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, worker: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{{LABEL}="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{{LABEL}="{worker}"}} {value}'
