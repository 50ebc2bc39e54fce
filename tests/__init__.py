"""Tests: unit (no Ray, no sockets), contract (over the registries), ray, gpu and e2e (the real model)."""
