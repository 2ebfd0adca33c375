"""Laws fitted to the run table, one file each. A fit keeps its n, its censored counts and the hash of its rows."""
