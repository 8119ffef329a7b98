"""The real models that tests share; each is fetched once into the user's cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from localkv.gguf.demo import fetch

# How fast a loaded machine runs an example says nothing about the code.
settings.register_profile(
    "localkv", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("localkv")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Return the path of SmolLM2-135M-Instruct Q4_1: plain attention, GQA, 30 layers."""
    return Path(fetch("demo"))


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Return the path of Gemma 3 270M: sliding windows and a vocabulary of 262k tokens."""
    return Path(fetch("demo-swa"))
