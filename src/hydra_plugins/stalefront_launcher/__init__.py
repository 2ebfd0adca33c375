"""Hydra launcher `local`."""
