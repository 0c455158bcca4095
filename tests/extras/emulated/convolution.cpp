// The kernels of convolution.cu as functions of a shared library; built by test_emulated_kernels.py with -D for one kind of number,
// channels and width.

#include "cuda.h"
// after it, since it stands on its functions
#include "convolution.cu"

template <typename Kernel>
static void over_grid(int x, int y, int z, Kernel kernel) {
    emulated::grid_size = {x, y, z};
    for (int k = 0; k < z; ++k)
        for (int j = 0; j < y; ++j)
            for (int i = 0; i < x; ++i) {
                emulated::block_index = {i, j, k};
                emulated::run_block(THREADS, kernel);
            }
}

extern "C" {
#ifdef TEST_CONVOLVE
void run_convolve(int blocks, int replicas, const TEST_NUMBER* x, const float* w, const TEST_NUMBER* plus, TEST_NUMBER* y, int images,
                  int height, int w_stride, int backward) {
    over_grid(blocks, replicas, 1, [=] {
        if (backward)
            convolve<TEST_NUMBER, TEST_CHANNELS, TEST_WIDTH, true, false>(x, w, nullptr, y, images, height, w_stride);
        else if (plus)
            convolve<TEST_NUMBER, TEST_CHANNELS, TEST_WIDTH, false, true>(x, w, plus, y, images, height, w_stride);
        else
            convolve<TEST_NUMBER, TEST_CHANNELS, TEST_WIDTH, false, false>(x, w, nullptr, y, images, height, w_stride);
    });
}
#endif

void run_filter_gradient(int blocks, int replicas, const TEST_NUMBER* x, const TEST_NUMBER* gradient, float* partial, int images,
                         int height) {
    over_grid(blocks, replicas, TEST_CHANNELS / 16,
              [=] { filter_gradient<TEST_NUMBER, TEST_CHANNELS, TEST_WIDTH>(x, gradient, partial, images, height); });
}
}
