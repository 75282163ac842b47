"""The examples of docs/autograd.md run, one after the other, and give the gradients of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "autograd.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_examples_give_the_gradients_of_one_process() -> None:
    def ranks(rank: int) -> list[Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        grads = []
        for number, example in enumerate(EXAMPLES):
            exec(compile(example, f"example {number} of docs/autograd.md", "exec"), names)
            layer = names["second" if rank else "first"]
            grads.append(layer.weight.grad)
            layer.zero_grad()
        return grads

    assert len(EXAMPLES) == 2
    got = run_ranks(ranks, 2, backend=None)
    torch.manual_seed(0)
    first, second, x = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1), torch.randn(3, 4)
    for number in range(2):
        hidden = first(x)
        loss = second(hidden if number == 0 else hidden.tanh()).sum()
        (loss + (hidden.pow(2).mean() if number else 0)).backward()
        for rank, layer in enumerate((first, second)):
            torch.testing.assert_close(got[rank][number], layer.weight.grad, rtol=1e-5, atol=1e-5)
            layer.zero_grad()


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
