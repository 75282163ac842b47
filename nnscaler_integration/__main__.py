"""``python -m nnscaler_integration``: versions, anchors and state."""

from __future__ import annotations

import sys

from .state import status

found = status()
print(found)
sys.exit(0 if found.reason is None else 1)
