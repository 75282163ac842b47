"""What stands in docstrings as Sphinx reads it, as Markdown: for the site of documents, which mkdocs builds.

mkdocstrings loads this file as an extension of griffe; see mkdocs.yml.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

import objcomm

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([\w.]+)`")
# A session at Python's prompt, to the next empty line; and the block behind a paragraph that ends with "::".
_SESSION = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
_LITERAL = re.compile(r"^( *)(\S.*)::\n\n((?:\1    .*\n?|\n)+)", re.MULTILINE)


# The page of calls has a place for these.
_PLACES = {f"objcomm.{name}" for name in objcomm.__all__ if name != "autograd"}


def markdown(text: str, module: str = "objcomm") -> str:
    """The docstring ``text`` without roles, sessions and literal blocks of Sphinx; it is from ``module``.

    >>> markdown("See :func:`~objcomm.send_object`, and :func:`its.own`.")
    'See [`send_object`][objcomm.send_object], and `its.own`.'
    >>> print(markdown("Example::\\n\\n    send(1)\\n"))
    Example:
    <BLANKLINE>
    ```python
    send(1)
    ```
    <BLANKLINE>
    """
    text = _LITERAL.sub(_block, text)
    text = _SESSION.sub(_session, text)

    def code(role: re.Match[str]) -> str:
        short, name = role.groups()
        shown = f"`{name.rpartition('.')[2] if short else name}`"
        place = name if "." in name else f"{module}.{name}"
        return f"[{shown}][{place}]" if place in _PLACES else shown

    return _ROLE.sub(code, text)


def _session(session: re.Match[str]) -> str:
    indent, lines = session.group(1), session.group(0)
    lines = re.sub(r"  # doctest: .*$", "", lines, flags=re.MULTILINE)
    return f"{indent}```pycon\n{lines}\n{indent}```"


def _block(literal: re.Match[str]) -> str:
    indent, before, block = literal.groups()
    code = textwrap.indent(textwrap.dedent(block).strip("\n"), indent)
    # A word and a colon alone would be a section of its own kind.
    before = f"**{before}**" if " " not in before else f"{before}:"
    return f"{indent}{before}\n\n{indent}```python\n{code}\n{indent}```\n\n"


class SphinxToMarkdown(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            part = (*obj.path.split("."), "")[1]
            module = f"objcomm.{part}" if part in ("autograd", "torch_compat") else "objcomm"
            obj.docstring.value = markdown(obj.docstring.value, module)
