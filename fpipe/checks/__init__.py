"""What a stage may not do, found while it is traced, and how the user is told."""
