"""Programs for one signature, made once and kept."""
