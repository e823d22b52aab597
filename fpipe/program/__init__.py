"""A schedule and pieces become programs, instructions over numbered slots."""
