"""The CUDA path of the gated delta rule. Importing this package loads nothing; `engine` loads Triton and the kernels."""
