"""Set before anything imports NumPy, and before a test starts a process."""

import os
import signal

# Tests and their processes multiply matrices in one thread. The threads of OpenBLAS wait for each
# other in busy loops: with two workers on two cores, they take more processor time than the
# products of small networks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, which the processes of tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
