"""``python -m benchmarks``: the point-to-point benchmark, with its arguments."""

from .p2p import main

main()
