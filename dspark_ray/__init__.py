"""dspark-ray: DSpark speculative decoding served by Ray Serve. See docs/architecture.md for the map."""
