"""How wrong each predictor is on traces: `make predictor-errors TRACES="FILE FILE"`.

The series is the prompt tokens of each ten seconds, which is what the predictive policy forecasts. An error is the mean
of the absolute differences as a share of the mean value, for the next interval, and for the seventh, in which a worker
would serve that takes a minute to start. A forecast is made from the fifth interval on.
"""

import argparse
import statistics
import sys
from pathlib import Path

from dynamo.planner import predictors
from dynamo.simulate import plan_arrivals

INTERVAL_S, FIRST = 10.0, 5
STEPS = (1, 7)
NAMES = ("constant", "moving-average", "arima", "kalman", "seasonal")


def read_series(path: Path) -> list[float]:
    """Return the prompt tokens of each complete interval of a trace."""
    requests = plan_arrivals.read_trace(path, limit=None).requests
    series = [0.0] * int(max(request.at for request in requests) / INTERVAL_S)
    for request in requests:
        number = int(request.at / INTERVAL_S)
        if number < len(series):
            series[number] += request.num_prompt
    return series


def errors_of(name: str, series: list[float]) -> list[float]:
    """Return the error of a predictor for each number of steps."""
    predictor = predictors.make_predictor(name)
    differences: dict[int, list[float]] = {step: [] for step in STEPS}
    for number, value in enumerate(series, 1):
        predictor.add(value)
        if number >= FIRST:
            forecast = predictor.forecast(max(STEPS))
            for step in STEPS:
                if number + step <= len(series):
                    actual = series[number + step - 1]
                    differences[step].append(abs(forecast[step - 1] - actual))
    return [statistics.fmean(differences[step]) / statistics.fmean(series) for step in STEPS]


def main() -> None:
    """Print a row for each trace and predictor, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    sys.stdout.write("| trace | predictor | error 10 s ahead | 70 s ahead |\n|---|---|---|---|\n")
    for path in parser.parse_args().traces:
        series = read_series(path)
        for name in NAMES:
            soon, later = errors_of(name, series)
            sys.stdout.write(f"| {path.stem} | {name} | {soon:.0%} | {later:.0%} |\n")


if __name__ == "__main__":
    main()
