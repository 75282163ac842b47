"""Makes nnScaler's code generator move objects between devices with objcomm.

A value with no static shape (an ``IRObject``: a nested dict, a list, a number) that one pipeline stage makes and
another uses is not moved by nnScaler 0.8 at all, and by 0.9 through torch's pickled object calls. After::

    import nnscaler_integration
    nnscaler_integration.install()

the code that nnScaler generates calls :func:`objcomm.move_object` there. Nothing of nnScaler is edited: functions are
wrapped in memory, and :func:`uninstall` puts them back. Generated code imports objcomm alone.

:func:`parallelize_submodules` parallelizes the submodules of a model that :func:`mark` marked.
"""

from __future__ import annotations

from .composite import parallelize_submodules
from .selection import mark
from .state import Status, install, status, uninstall
from .ties import tied_places, with_tied

__all__ = [
    "Status",
    "install",
    "mark",
    "parallelize_submodules",
    "status",
    "tied_places",
    "uninstall",
    "with_tied",
]
