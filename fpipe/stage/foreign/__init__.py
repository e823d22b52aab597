"""Code that tracing does not look into: backwards of others, kernels, functions of torch.jit."""
