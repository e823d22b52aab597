"""The search for good schedules: policies, a list scheduler, and local search on orders."""
