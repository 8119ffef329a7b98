"""Sweeps: points in, measured records out, one fresh process per point."""
