"""From a joint graph to the callables that a schedule runs."""
