"""Schedules and costs as files: CSV as torch reads and writes it, JSON, and text for people.

`Schedule` and `Cost` import these modules, which know only the content of a file (`files.Plain`).
"""
