"""Generators of published schedules, by placement. `fpipe.schedules` has their public names."""
