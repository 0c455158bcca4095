"""CUDA kernels for the most expensive operations of many replicas run as one network.

cuDNN's grouped convolutions are designed for few wide groups; replicas of a small network are many narrow ones. Here a
program processes a tile of pixels of one replica, as a matrix product on the tensor cores. Images are stored channels
last, `(S·B, H, W, C)`.

Everything has a Triton kernel. The most important case, stride 1 and as many input as output channels, is also
implemented in CUDA C++ (convolution.cu), where a tile stays in shared memory for all nine taps; nvrtc.py compiles it
with NVRTC, which comes with torch. tests/extras/test_emulated_kernels.py runs it on a CPU.
"""
