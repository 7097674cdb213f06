"""`python -m dynamo.planner.planner_sla`: the planner with `--policy sla --mode disagg` unless the flags say otherwise.

The original has no mode: it always scales prefill and decode workers apart.
"""

import sys

from dynamo.planner import __main__ as command

if __name__ == "__main__":
    sys.argv[1:1] = ["--policy", "sla", "--mode", "disagg"]
    sys.exit(command.main())
