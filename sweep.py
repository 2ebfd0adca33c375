"""Runs one cell, or with -m a grid of cells: `python sweep.py --help`."""

if __name__ == "__main__":
    from stalefront.app import main

    main()
