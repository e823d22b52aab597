"""The arguments of a call: trees flattened, split into microbatches, and their signature."""
