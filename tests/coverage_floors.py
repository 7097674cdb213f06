"""Fail if the tests reach too few lines: `python tests/coverage_floors.py REPORT`, a JSON report of coverage's.

Two shares are held: that of all lines of `dynamo`, and that of the deciders, which mark themselves (`deciders`): they
need neither sockets nor devices, so nothing keeps a test from a line of theirs.
"""

import json
import pathlib
import sys

import deciders

ALL_LINES_PERCENT = 92.0
DECIDERS_PERCENT = 99.0
ROOT = pathlib.Path(__file__).parents[1]


def decider_files():
    """Return the files of the deciders, as paths from the root of the repository."""
    return {str(path.relative_to(ROOT)) for path in deciders.PATHS}


def percent(summaries):
    """Return which share of the lines of some files was reached, in percent."""
    num_lines = sum(summary["num_statements"] for summary in summaries)
    return 100 * sum(summary["covered_lines"] for summary in summaries) / max(1, num_lines)


def shortfalls(report, deciders):
    """Return one sentence for each share that is below its floor, and one for each decider that is."""
    summary_by_file = {path: entry["summary"] for path, entry in report["files"].items()}
    missing = deciders - summary_by_file.keys()
    decider_summaries = [summary_by_file[path] for path in deciders - missing]
    sentences = [f"{path}: a decider that no test imports" for path in sorted(missing)]
    all_lines = percent(summary_by_file.values())
    if all_lines < ALL_LINES_PERCENT:
        sentences.append(f"all lines: expected {ALL_LINES_PERCENT} %, got {all_lines:.2f} %")
    if percent(decider_summaries) < DECIDERS_PERCENT:
        sentences.append(
            f"deciders: expected {DECIDERS_PERCENT} %, got {percent(decider_summaries):.2f} %"
        )
        sentences += [
            f"{path}: lines {', '.join(map(str, report['files'][path]['missing_lines']))}"
            for path in sorted(deciders - missing)
            if report["files"][path]["missing_lines"]
        ]
    return sentences


def main(argv):
    """Print the shortfalls and return the exit status."""
    report = json.loads(pathlib.Path(argv[0]).read_text())
    decider_paths = decider_files()
    sentences = shortfalls(report, decider_paths)
    for sentence in sentences:
        sys.stderr.write(sentence + "\n")
    if not sentences:
        summaries = [entry["summary"] for entry in report["files"].values()]
        decided = [report["files"][path]["summary"] for path in decider_paths]
        sys.stdout.write(
            f"lines that tests reach: {percent(summaries):.2f} %, of deciders {percent(decided):.2f} %\n"
        )
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
