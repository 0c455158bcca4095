// Direct 3×3 convolutions of any stride and padding, from images (N, H, W, inputs) to (N, rows, columns, outputs).

#pragma once

#include <algorithm>

#include "norm.h"

namespace {

struct Filters {
    int replicas, images, height, width, inputs, rows, columns, outputs, stride, padding, threads;
    int64_t apart;  // elements from a replica's filters to the next; 0 if shared

    int sets() const { return apart ? replicas : 1; }  // sets of filters
    size_t image() const { return static_cast<size_t>(height) * width * inputs; }
    size_t output() const { return static_cast<size_t>(rows) * columns * outputs; }
    int wide() const { return width + 2 * padding; }
    size_t padded() const { return static_cast<size_t>(height + 2 * padding) * wide() * inputs; }
    size_t padded_output() const { return static_cast<size_t>(rows + 4) * (columns + 4) * outputs; }
};

// Channels are processed in bands of two vectors, or one if that is enough.
inline int band(int channels) { return channels <= LANES ? LANES : 2 * LANES; }
inline int bands(int channels) { return (channels + band(channels) - 1) / band(channels); }

// Copy an image with zero padding.
void pad(const float* image, int height, int width, int channels, int padding, float* to) {
    int row_size = width * channels, wide = (width + 2 * padding) * channels;
    std::fill_n(to, static_cast<size_t>(height + 2 * padding) * wide, 0.0f);
    for (int row = 0; row < height; row++)
        std::copy_n(image + row * row_size, row_size, to + (row + padding) * wide + padding * channels);
}

// The terms of a line of pixels: the sum over the taps and over i of x[position · apart + i] w[i][channel].
struct Taps {
    int depth, apart;  // range of i; elements from a position to the next
    int count = 0;
    const float *x[9], *w[9];

    Taps(int depth, int apart) : depth(depth), apart(apart) {}

    void add(const float* from, const float* matrix) {
        x[count] = from;
        w[count++] = matrix;
    }

    // Sum for TALL positions and a band of WIDE vectors; in y, which has `channels` channels, positions are `step`
    // elements apart.
    template <int TALL, int WIDE>
    void sum(int position, float* y, int step, int channels) const {
        Vector sums[TALL][WIDE] = {};
        for (int k = 0; k < count; k++) {
            const float *from = x[k] + position * apart, *matrix = w[k];
            for (int i = 0; i < depth; i++) {
                Vector row[WIDE];
                for (int q = 0; q < WIDE; q++) row[q] = load(matrix + (i * WIDE + q) * LANES);
                for (int r = 0; r < TALL; r++)
                    for (int q = 0; q < WIDE; q++) sums[r][q] += from[r * apart + i] * row[q];
            }
        }
        for (int r = 0; r < TALL; r++)
            for (int q = 0; q < WIDE; q++) {
                float* to = y + (position + r) * step + q * LANES;
                if ((q + 1) * LANES <= channels)
                    store(to, sums[r][q]);
                else
                    for (int lane = 0; lane < channels - q * LANES; lane++) to[lane] = sums[r][q][lane];
            }
    }

    // The last block overlaps the one before, so that all blocks are full.
    template <int TALL, int WIDE>
    void sum_blocks(int positions, float* y, int step, int channels) const {
        for (int position = 0; position < positions; position += TALL)
            sum<TALL, WIDE>(std::min(position, positions - TALL), y, step, channels);
    }

    template <int WIDE>
    void sum_line(int positions, float* y, int step, int channels) const {
        constexpr int MOST = KEPT / WIDE, FEW = std::max(MOST / 2, 1);
        if (positions >= MOST)
            sum_blocks<MOST, WIDE>(positions, y, step, channels);
        else if (positions >= FEW)
            sum_blocks<FEW, WIDE>(positions, y, step, channels);
        else
            sum_blocks<1, WIDE>(positions, y, step, channels);
    }
};

void sum_line(const Taps& taps, int wide, int positions, float* y, int step, int channels) {
    if (wide == LANES)
        taps.sum_line<1>(positions, y, step, channels);
    else
        taps.sum_line<2>(positions, y, step, channels);
}

// Reorder filters (S, outputs, inputs, 3, 3) to (S, bands of outputs, 9, inputs, band) or, transposed, to (S, bands of
// inputs, 9, outputs, band), zero-padded to whole bands. To be called by all threads.
void arrange_filters(const Filters& f, const float* w, bool transposed, float* to) {
    int depth = transposed ? f.outputs : f.inputs, channels = transposed ? f.inputs : f.outputs;
    int step = (transposed ? f.inputs : 1) * 9, channel_step = (transposed ? 1 : f.inputs) * 9, wide = band(channels);
#pragma omp for schedule(static)
    for (int index = 0; index < f.sets() * bands(channels) * depth; index++) {
        int set = index / depth / bands(channels), first = index / depth % bands(channels) * wide, i = index % depth;
        const float* from = w + set * f.apart + i * step + first * channel_step;
        float* matrix = to + (static_cast<size_t>(index / depth) * 9 * depth + i) * wide;
        for (int c = 0; c < wide; c++)
            for (int k = 0; k < 9; k++)
                matrix[k * depth * wide + c] = first + c < channels ? from[c * channel_step + k] : 0;
    }
}

// Add to sums[i][o] the sum of x · g over the pixels of an image, for one row of taps, TALL i and WIDE vectors of o; i
// indexes the columns and inputs of the row together.
template <int TALL, int WIDE>
void add_taps(const Filters& f, const float* x, const float* g, float* sums) {
    Vector own[TALL][WIDE];
    for (int r = 0; r < TALL; r++)
        for (int q = 0; q < WIDE; q++) own[r][q] = load(sums + r * f.outputs + q * LANES);
    for (int row = 0; row < f.rows; row++)
        for (int column = 0; column < f.columns; column++) {
            const float* from = x + (row * f.wide() + column) * f.stride * f.inputs;
            const float* by = g + (row * f.columns + column) * f.outputs;
            Vector incoming[WIDE];
            for (int q = 0; q < WIDE; q++) incoming[q] = load(by + q * LANES);
            for (int r = 0; r < TALL; r++)
                for (int q = 0; q < WIDE; q++) own[r][q] += from[r] * incoming[q];
        }
    for (int r = 0; r < TALL; r++)
        for (int q = 0; q < WIDE; q++) store(sums + r * f.outputs + q * LANES, own[r][q]);
}

}  // namespace

extern "C" {

// y = the convolution of x with each replica's filters. Returns false if memory is insufficient, as do those below.
bool strided_forward(const Filters* filters, const float* x, const float* w, float* y) {
    const Filters& f = *filters;
    int wide = band(f.outputs), matrix = 3 * f.inputs * wide;
    size_t size = static_cast<size_t>(bands(f.outputs)) * 3 * matrix;
    float* arranged = caller.get(f.sets() * size);
    if (!arranged) return false;
    return work_together(f.threads, f.padded(), [&](float* padded) {
        arrange_filters(f, w, false, arranged);
#pragma omp for schedule(static)
        for (int n = 0; n < f.replicas * f.images; n++) {
            const float* own = arranged + (f.apart ? n / f.images : 0) * size;
            pad(x + n * f.image(), f.height, f.width, f.inputs, f.padding, padded);
            for (int index = 0; index < bands(f.outputs) * f.rows; index++) {
                int place = index / f.rows, row = index % f.rows, channel = place * wide;
                Taps taps(3 * f.inputs, f.stride * f.inputs);  // the three taps of a row are contiguous
                for (int k = 0; k < 3; k++)
                    taps.add(padded + (row * f.stride + k) * f.wide() * f.inputs, own + (place * 3 + k) * matrix);
                float* to = y + n * f.output() + row * f.columns * f.outputs + channel;
                sum_line(taps, wide, f.columns, to, f.outputs, f.outputs - channel);
            }
        }
    });
}

// Compute dx, the gradient w.r.t. the input, from g, the gradient w.r.t. the output.
bool strided_backward(const Filters* filters, const float* g, const float* w, float* dx) {
    const Filters& f = *filters;
    int wide = band(f.inputs), matrix = f.outputs * wide, s = f.stride, lines = f.height * s;
    size_t size = static_cast<size_t>(bands(f.inputs)) * 9 * matrix;
    float* arranged = caller.get(f.sets() * size);
    if (!arranged) return false;
    return work_together(f.threads, f.padded_output(), [&](float* padded) {  // by 2, the reach of the taps
        arrange_filters(f, w, true, arranged);
#pragma omp for schedule(static)
        for (int n = 0; n < f.replicas * f.images; n++) {
            const float* own = arranged + (f.apart ? n / f.images : 0) * size;
            pad(g + n * f.output(), f.rows, f.columns, f.outputs, 2, padded);
            // Every s-th pixel of a row has the same taps: those that connect it to an output.
            for (int index = 0; index < bands(f.inputs) * lines; index++) {
                int place = index / lines, row = index % lines / s, first = index % s, channel = place * wide;
                Taps taps(f.outputs, f.outputs);
                for (int k = 0; k < 9; k++) {
                    int down = row + f.padding - k / 3, right = first + f.padding - k % 3;
                    if (down % s == 0 && right % s == 0)
                        taps.add(padded + ((down / s + 2) * (f.columns + 4) + right / s + 2) * f.outputs,
                                 own + (place * 9 + k) * matrix);
                }
                float* to = dx + n * f.image() + (row * f.width + first) * f.inputs + channel;
                sum_line(taps, wide, (f.width - first + s - 1) / s, to, s * f.inputs, f.inputs - channel);
            }
        }
    });
}

// Compute dw (S, outputs, inputs, 3, 3), each replica's gradient w.r.t. the filters, from g, that w.r.t. the output.
bool strided_filters(const Filters* filters, const float* x, const float* g, float* dw) {
    constexpr int TALL = 6;  // elements of a row of taps, whose length is a multiple of 3
    const Filters& f = *filters;
    int row_size = 3 * f.inputs, blocks = (row_size + TALL - 1) / TALL;
    int across = (f.outputs + 2 * LANES - 1) / (2 * LANES);
    size_t size = static_cast<size_t>(3) * row_size * f.outputs;  // sums of a replica, (3, 3 · inputs, outputs)
    float* padded = caller.get(f.padded() * f.replicas * f.images + size * f.replicas);
    if (!padded) return false;
    float* sums = padded + f.padded() * f.replicas * f.images;
    return work_together(f.threads, 0, [&](float*) {
#pragma omp for schedule(static)
        for (int n = 0; n < f.replicas * f.images; n++)
            pad(x + n * f.image(), f.height, f.width, f.inputs, f.padding, padded + n * f.padded());
#pragma omp for schedule(static)
        for (int replica = 0; replica < f.replicas; replica++) std::fill_n(sums + replica * size, size, 0.0f);
        for (int image = 0; image < f.images; image++)  // the outer loop, so that it stays in the cache
#pragma omp for schedule(static) nowait
            for (int index = 0; index < f.replicas * 3 * blocks * across; index++) {
                int o = index % across * 2 * LANES, i = index / across % blocks * TALL;
                int row = index / across / blocks % 3, replica = index / across / blocks / 3;
                int n = replica * f.images + image;
                const float* from = padded + n * f.padded() + row * f.wide() * f.inputs + i;
                auto add = o + LANES == f.outputs ? (i + TALL > row_size ? add_taps<3, 1> : add_taps<TALL, 1>)
                                                  : (i + TALL > row_size ? add_taps<3, 2> : add_taps<TALL, 2>);
                add(f, from, g + n * f.output() + o, sums + replica * size + (row * row_size + i) * f.outputs + o);
            }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int index = 0; index < f.replicas * f.outputs; index++) {
            const float* from = sums + index / f.outputs * size + index % f.outputs;
            float* filter = dw + static_cast<size_t>(index) * f.inputs * 9;
            for (int k = 0; k < 9; k++)
                for (int i = 0; i < f.inputs; i++)
                    filter[i * 9 + k] = from[(k / 3 * row_size + k % 3 * f.inputs + i) * f.outputs];
        }
    });
}
}
