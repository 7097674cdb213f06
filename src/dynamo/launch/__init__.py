"""Child processes on one machine: started, watched, restarted, stopped, and never left behind."""
