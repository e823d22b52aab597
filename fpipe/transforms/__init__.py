"""Transforms: from a pipeline to a pipeline, by transforming its stages."""
