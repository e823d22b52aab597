"""Records one loss function with cuts, and divides it; `function_tracer` is the entrance."""
