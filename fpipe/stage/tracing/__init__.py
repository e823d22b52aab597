"""From functions to joint graphs of forward and backward."""
