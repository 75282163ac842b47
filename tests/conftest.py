"""What may be skipped, and nothing else: tests for nnScaler where it is not installed, for a GPU where there
is none. And over what tests run that run over everything."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator

import pytest
import torch

from tests import ranks

# Of ranks of one host: over gloo, over a backend without tags that demands equal sizes, and around both of them.
BACKENDS = ["gloo", "strict", "local"]

_ALLOWED = re.compile(r"\b(nnscaler|gpu|cuda)\b", re.IGNORECASE)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """What a test hands to ``run_ranks``."""
    return str(request.param)


@pytest.fixture
def default_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "default_backend", request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What hands ``run_ranks`` no backend runs over gloo and within the host, where the module is marked so."""
    if metafunc.definition.get_closest_marker("also_local") and "backend" not in metafunc.fixturenames:
        metafunc.fixturenames.append("default_backend")
        metafunc.parametrize("default_backend", ["gloo", "local"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A marker is enough: the test itself need not look for what it needs."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("nnscaler") and importlib.util.find_spec("nnscaler") is None:
            item.add_marker(pytest.mark.skip(reason="needs nnScaler"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_silence(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _refuse_silence(report)
    return report


def _refuse_silence(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip hides a missing dependency as well as it hides a fault, so any other reason is a failure."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not _ALLOWED.search(reason):
        report.outcome = "failed"
        report.longrepr = f"only nnScaler or a GPU may be missing, but this was skipped: {reason}"
