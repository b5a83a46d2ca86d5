"""Every searcher passes the Searcher contract."""

from dataclasses import replace

import pytest

from understudy.testing.searchers import SearcherContract
from understudy.tuning.search import SearchPlan, make_searcher
from understudy.tuning.trial import Searcher


class TestRandom(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        return make_searcher(plan)


class TestGrid(SearcherContract):
    is_random = False

    def make(self, plan: SearchPlan) -> Searcher:
        return make_searcher(replace(plan, method="grid"))


class TestSobol(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        return make_searcher(replace(plan, method="sobol"))


class TestTpe(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        pytest.importorskip("optuna", reason="the extra `optuna` is not installed")
        return make_searcher(replace(plan, method="tpe"))


class TestCma(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        pytest.importorskip("cmaes", reason="the extra `optuna` is not installed")
        pytest.importorskip("optuna", reason="the extra `optuna` is not installed")
        return make_searcher(replace(plan, method="cma"))


class TestGp(SearcherContract):
    def make(self, plan: SearchPlan) -> Searcher:
        pytest.importorskip("optuna", reason="the extra `optuna` is not installed")
        pytest.importorskip("torch", reason="PyTorch is not installed")
        return make_searcher(replace(plan, method="gp"))
