"""``python -m localkv``."""

from localkv.cli import run

run()
