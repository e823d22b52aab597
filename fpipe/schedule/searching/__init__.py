"""The search for good schedules. Import `search` and `SearchResult` from `searching.finder`."""
