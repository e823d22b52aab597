"""Refuses what a stage may not do while it is traced, and explains it to the user."""
