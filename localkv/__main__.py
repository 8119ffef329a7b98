"""``python -m localkv``."""

from localkv.cli import main

main()
