"""Whether a schedule is whole and can run."""
