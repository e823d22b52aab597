"""Public transforms: from a pipeline to a pipeline, by the definitions of `fpipe.functional`.

`fpipe` makes their names public; `fpipe.training` uses `norms`.
"""
