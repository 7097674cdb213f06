"""A command beside busy processes: `python -m benchmarks.busy --processes 8 -- make test` (make test-busy).

Each busy process keeps a core busy as far as it gets one. They end with the command, however that ends. Printed at the
end are the load averages and the seconds that the command took; the exit code is the command's.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time

SPIN = "import os, sys\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"


def main() -> int:
    """Return the exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        for _ in range(options.processes):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(busy.kill)
        began_at = time.monotonic()
        code = subprocess.run(options.command, check=False).returncode
        took_s = time.monotonic() - began_at
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{options.processes} busy processes, load averages {loads}, {took_s:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
