"""Child processes that end with their parent."""

import ctypes
import os
import signal

from etude.errors import EtudeError

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "ETUDE_PARENT"  # set by the parent to its own pid
NODE_VARIABLE = "ETUDE_NODE"  # set by what starts a service to the name of its machine


def parent_process() -> int:
    """Return the pid of the process that started this one.

    The parent passes it in the environment: by the time a child asks the kernel, its parent may already be dead and
    another process have adopted it.
    """
    return int(os.environ.get(PARENT_VARIABLE, os.getppid()))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        raise EtudeError("the process that started this one has ended")
