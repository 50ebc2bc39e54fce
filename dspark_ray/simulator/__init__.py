"""A fleet on paper: the real policies on measured step tables and recorded acceptance. No model, no Ray."""
