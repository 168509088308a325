"""The simulated CUDA device: kernels are compiled by a C++ compiler of the host and run thread by thread."""
