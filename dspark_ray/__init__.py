"""dspark-ray: DSpark speculative decoding served by Ray Serve. See docs/architecture.md for the map."""

import os

# Threads of a step meet at some 300 barriers. Where one of them has lost its core to another process, the
# others had better sleep: spinning for a millisecond, as is the default, keeps the cores from whoever is
# waited for, and a step takes ten times as long. libgomp reads it when torch loads, so it comes first.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
