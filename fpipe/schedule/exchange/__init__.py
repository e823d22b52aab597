"""Schedules as files: CSV as torch reads and writes it, JSON of our own, and text for people.

The modules know the parts of a schedule (`plain.Plain`), not `Schedule`, which delegates to them.
"""
