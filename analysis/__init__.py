"""From step records to a frontier report: run table, collapse verdicts, fits, figures.

Reads the files of a sweep directory (``docs/data_flow.md``) and nothing else: no torch, no training, no network.
Analysis settings are dataclass fields with defaults here, since no Hydra configuration reaches this side.

Start at :func:`stalefront.analysis.tables.build_table` (one row a planned cell) or
:func:`stalefront.analysis.report.build_report` (everything).
"""
