"""What no schedule beats, for a placement, a cost and a memory."""
