"""The programs for one signature, made once and kept."""
