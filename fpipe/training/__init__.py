"""Training steps: an optimizer of torch as a pure function, beside a pipeline's step."""
