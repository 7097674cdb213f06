"""`python -m dynamo.planner.planner_sla`: the planner with `--policy sla` unless the flags say otherwise."""

import sys

from dynamo.planner import __main__ as command

if __name__ == "__main__":
    sys.argv[1:1] = ["--policy", "sla"]
    sys.exit(command.main())
