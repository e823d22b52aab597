"""What a call is given: trees flattened, split into microbatches, and their signature."""
