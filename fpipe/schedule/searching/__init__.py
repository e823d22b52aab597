"""The search for good schedules: `searching.finder` has `search`, `searching.result` its result."""
