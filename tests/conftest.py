"""Before torch is loaded: threads that wait must not spin, or tests of tiny models crawl when the machine is busy."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
