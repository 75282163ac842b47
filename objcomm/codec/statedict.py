"""What ``Module.state_dict()`` returns: an OrderedDict with an attribute. It need not be pickled for that."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from . import registry

NAME = "OrderedDict.attributes"


def _flatten(obj: OrderedDict[Any, Any]) -> list[Any]:
    return [OrderedDict(obj), dict(vars(obj))]


def _rebuild(parts: list[Any]) -> OrderedDict[Any, Any]:
    items, attributes = parts
    if type(items) is not OrderedDict or type(attributes) is not dict:
        raise ValueError("an OrderedDict with attributes is made of an OrderedDict and a dict")
    if not all(type(name) is str for name in attributes):
        raise ValueError("attributes have names")
    vars(items).update(attributes)
    return items


registry.register(NAME, lambda obj: type(obj) is OrderedDict and bool(vars(obj)), _flatten, _rebuild, base=OrderedDict)
