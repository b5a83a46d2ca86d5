"""Processes of their own for functions of these tests, forked from one that imported them once."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.models.test_registry", "tests.models.test_shared"])
