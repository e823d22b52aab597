"""Values move between the ranks of a process group, to and from devices."""
