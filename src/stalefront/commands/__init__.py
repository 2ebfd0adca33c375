"""The subcommands of `stalefront`: what a sweep directory is doing, and how to stop it or run it again."""
