"""Transforms of definitions: stages, loss and convention replaced by transformed ones.

A definition comes in and a definition goes out; nothing here knows a pipeline that runs.
`fpipe.transforms` makes pipelines of them for users, `fpipe.autograd` for calls within autograd.
"""
