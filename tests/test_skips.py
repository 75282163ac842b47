"""The rule of conftest.py about skips, with a suite of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n  gpu: x\n  nnscaler: x\n")
    return pytester


def test_skips_for_nnscaler_or_a_gpu_pass(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_a="""
        import pytest
        def test_gpu(): pytest.skip("needs a GPU")
        @pytest.mark.skipif(True, reason="nnscaler 0.9 only")
        def test_version(): pass
        @pytest.mark.xfail(strict=True)
        def test_known(): assert False
        """,
        test_b="""
        import pytest
        pytest.importorskip("nnscaler.no_such_part")
        """,
    )
    result = suite.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(skipped=3, xfailed=1)
    assert result.ret == 0


@pytest.mark.parametrize(
    "body",
    [
        "import pytest\ndef test_a(): pytest.skip('slow')",
        "import pytest\n@pytest.mark.skip\ndef test_a(): pass",
        "import pytest\n@pytest.fixture\ndef f(): pytest.skip('no network')\ndef test_a(f): pass",
        "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass",
    ],
    ids=["call", "marker", "fixture", "module"],
)
def test_any_other_skip_fails(suite: pytest.Pytester, body: str) -> None:
    suite.makepyfile(body)
    result = suite.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*only nnScaler or a GPU may be missing, but this was skipped:*"])
