"""The runtime: programs, how they are made from schedules, and how they are run."""
