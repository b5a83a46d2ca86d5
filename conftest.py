"""Set before anything imports NumPy: tests and their processes multiply matrices in one thread.

The threads of OpenBLAS wait for each other in busy loops: with two workers on two cores, they take
more processor time than the products of small networks.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
