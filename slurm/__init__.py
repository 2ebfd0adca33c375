"""Slurm: site profiles, submission of packed cells as job arrays, and what a job's end means for its cells."""
