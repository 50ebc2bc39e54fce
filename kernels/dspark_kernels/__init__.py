"""The tensor ops of the decoders, each with a torch reference and a faster version where it pays.

This package knows nothing of the program above it: tensors in, tensors out. Import the op from its module,
e.g. `from dspark_kernels.norm import rms_norm`; `dspark_kernels.dispatch` chooses the version.
"""
