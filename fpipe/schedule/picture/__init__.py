"""Pictures of schedules and timelines: SVG, an HTML page, a trace, text.

Every picture is drawn from a `chart.Chart`. `Schedule` and `Timeline` import these modules, which
know neither.
"""
