"""Pipelines of unmodified modules: `module_entry` makes them, `balancing` chooses their cuts.

Users get all names from `fpipe`. In the package `training` alone imports from here.
"""
