"""Named sweeps: data files, one choice of `sweep=NAME` each."""
