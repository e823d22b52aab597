"""What a stage may not do, and how its user is told so."""
