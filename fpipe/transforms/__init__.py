"""Public transforms: from a pipeline to a pipeline, by the definitions of `fpipe.functional`."""
