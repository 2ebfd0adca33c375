"""Named sweeps that ship with the package."""
