"""Pipelines of unmodified modules: `module_entry` and `balancing` are the ways in.

The rest of the package imports nothing from here; the names that users need are those of `fpipe`.
"""
