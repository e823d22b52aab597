"""Schedules and timelines as pictures: SVG, a page to look around in, a trace, text.

Every picture is drawn from a `chart.Chart`: `clock` gives a schedule its times, a timeline has its
own. The modules know neither `Schedule` nor `Timeline`, which delegate to them.
"""
