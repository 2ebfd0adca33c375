"""Hydra sweeper `grid`."""
