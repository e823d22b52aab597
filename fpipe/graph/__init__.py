"""The fx graphs of a stage: what can be asked of nodes, and passes over them."""
