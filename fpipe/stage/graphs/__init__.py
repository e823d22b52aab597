"""Graphs of a stage: what their values are, and rewrites of them."""
