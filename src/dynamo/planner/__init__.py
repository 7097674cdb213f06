"""The planner: how many workers a model needs, and the profiler that measures what one worker can do."""
