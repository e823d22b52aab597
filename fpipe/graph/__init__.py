"""The fx graphs of a stage: questions about nodes, and passes over graphs."""
