"""Configuration files that ship with the package."""
