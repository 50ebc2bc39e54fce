"""Tests that start a local Ray cluster: `pytest -m ray`."""
