"""CUDA kernels for what costs the most when many replicas run as one network.

cuDNN's grouped convolutions are made for few wide groups; replicas of a small network are many narrow ones. Here a
program works for one replica, on a tile of its pixels, as a matrix product on the tensor cores. Images lie in memory
with their channels last, `(S·B, H, W, C)`.

All of it is in Triton. convolution.cu has the case that matters most, as many channels in as out and stride 1, in CUDA
C++, where a tile can stay in shared memory for all nine taps; nvrtc.py compiles it with NVRTC, which comes with torch.
tests/extras/test_emulated_kernels.py runs that on a CPU.
"""
