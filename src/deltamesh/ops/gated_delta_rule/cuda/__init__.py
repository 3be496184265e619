"""The CUDA path of the gated delta rule. Importing it loads nothing; its `engine` loads Triton and the kernels."""
