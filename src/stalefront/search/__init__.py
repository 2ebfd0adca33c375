"""Search for the frontier: where each arm begins to collapse, from a handful of runs; see `docs/search.md`."""
