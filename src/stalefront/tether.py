"""Starts a command that does not hear what a batch system tells every process of a job, and can end with its parent.

`python -m stalefront.tether [--tied] COMMAND …` turns into COMMAND. This is set here and not between fork and
exec, which is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Of linux/prctl.h.
PR_SET_PDEATHSIG = 1
# What Slurm sends to ask for an orderly end, and what it can be told to send.
UNHEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def die_with_parent() -> None:
    """Be killed when the parent's thread that started this process is gone, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(command: list[str]) -> None:
    """Become `command`; ignored signals and the tie to the parent outlast that."""
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    if command[0] == "--tied":
        die_with_parent()
        command = command[1:]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
