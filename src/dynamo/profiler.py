"""`python -m dynamo.profiler`: measures what one worker can do, and recommends a deployment."""

import sys

from dynamo.planner import profiling

if __name__ == "__main__":
    sys.exit(profiling.main())
