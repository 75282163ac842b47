"""Settings: where they come from, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import objcomm
from objcomm.config import Settings, from_environment


def test_the_environment_is_read() -> None:
    environ = {
        "OBJCOMM_TRUST": "restricted",
        "OBJCOMM_LOCAL_TRANSPORT": "0",
        "OBJCOMM_MAX_BYTES": "1000",
        "OBJCOMM_TIMEOUT": "2.5",
        "OBJCOMM_POOL_BYTES": "0",
    }
    assert from_environment(environ) == Settings("restricted", False, 1000, 2.5, 0)
    assert from_environment({}) == Settings()
    assert from_environment(dict.fromkeys(environ, "")) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OBJCOMM_TRUST", "Restricted"),
        ("OBJCOMM_LOCAL_TRANSPORT", "yes"),
        ("OBJCOMM_MAX_BYTES", "1e9"),
        ("OBJCOMM_MAX_BYTES", "-5"),
        ("OBJCOMM_TIMEOUT", "soon"),
        ("OBJCOMM_TIMEOUT", "0"),
        ("OBJCOMM_TIMEOUT", "nan"),
        ("OBJCOMM_POOL_BYTES", "-1"),
        ("OBJCOMM_POOL_BYTES", "much"),
    ],
)
def test_a_wrong_variable_is_told(name: str, value: str) -> None:
    with pytest.raises(objcomm.UsageError, match="OBJCOMM_") as caught:
        from_environment({name: value})
    assert value.lstrip("-") in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trust": "all"},
        {"local_transport": 1},
        {"max_bytes": 0},
        {"max_bytes": True},
        {"timeout": -1},
        {"timeout": "5"},
        {"pool_bytes": -1},
        {"pool_bytes": 1.5},
        {"pool_bytes": True},
    ],
    ids=str,
)
def test_configure_changes_nothing_where_one_value_is_wrong(wrong: dict[str, Any]) -> None:
    before = objcomm.settings()
    with pytest.raises(objcomm.UsageError):
        objcomm.configure(**wrong)
    assert objcomm.settings() == before
    try:
        assert objcomm.configure(timeout=7.0, trust="restricted") == Settings("restricted", timeout=7.0)
        assert objcomm.configure(trust="cluster").timeout == 7.0
    finally:
        objcomm.configure(timeout=None, trust="cluster")
