"""Before torch is loaded: threads that wait must not spin, or tests of tiny models crawl when the machine is busy.

And what a script starts in the background ignores Ctrl-C, with all that it starts: tests that send it would fail.
"""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
