"""Stages: from pure functions to compiled forward, input-gradient and weight-gradient pieces."""
