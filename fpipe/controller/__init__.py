"""Controllers: who drives the ranks. One process drives all of them, or each process its own."""
