"""Values move between ranks: in one process, over a process group, to and from devices."""
