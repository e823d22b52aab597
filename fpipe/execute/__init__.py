"""Programs run: one process drives all ranks, or each process its own."""
