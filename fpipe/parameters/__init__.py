"""Parameters that a pipeline makes, holds, reads and saves, where its ranks need them.

Users reach this room by methods of `Pipeline` and `Trainer`.
"""
