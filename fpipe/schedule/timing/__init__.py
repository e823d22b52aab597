"""When what runs, and what a rank holds then."""
