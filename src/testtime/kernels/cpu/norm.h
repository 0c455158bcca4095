// Vectors, scratch memory, and GroupNorm of one image.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>

namespace {

// Channels per vector register, and vectors that a product accumulates in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, KEPT = 16;
#elif defined(__AVX__)
constexpr int LANES = 8, KEPT = 8;
#else
constexpr int LANES = 4, KEPT = 8;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }

// Thread-local memory that is reused between calls, aligned to cache lines.
class Scratch {
    std::unique_ptr<float[]> memory;
    size_t size = 0;

   public:
    // Returns null if the allocation fails.
    float* get(size_t wanted) {
        constexpr size_t LINE = 64;  // bytes
        if (!memory || size < wanted) {
            memory.reset();
            memory.reset(new (std::nothrow) float[wanted + LINE / sizeof(float)]);
            size = wanted;
        }
        auto address = reinterpret_cast<uintptr_t>(memory.get());
        return reinterpret_cast<float*>((address + LINE - 1) / LINE * LINE);
    }
};

thread_local Scratch worker;  // private to each worker thread
thread_local Scratch caller;  // of the calling thread, shared with its workers

// Call work(room) in each thread, with room for `size` floats; returns false, without any work, if memory is
// insufficient.
template <typename Work>
bool work_together(int threads, size_t size, Work work) {
    std::atomic<bool> enough{true};
#pragma omp parallel num_threads(threads)
    {
        float* room = worker.get(size);
        if (!room) enough = false;
#pragma omp barrier
        if (enough) work(room);
    }
    return enough;
}

// Sum COUNT terms, computed by term(pixel, values), over the pixels of an image, for one vector of channels.
template <int COUNT, typename Term>
inline void sum_pixels(int pixels, Term term, Vector totals[COUNT]) {
    Vector sums[4][COUNT] = {}, values[COUNT];
    auto add = [&](int p, Vector* to) {
        term(p, values);
        for (int k = 0; k < COUNT; k++) to[k] += values[k];
    };
    int p = 0;
    for (; p + 4 <= pixels; p += 4)
        for (int k = 0; k < 4; k++) add(p + k, sums[k]);
    for (; p < pixels; p++) add(p, sums[0]);
    for (int k = 0; k < COUNT; k++) totals[k] = (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
}

// GroupNorm, optionally followed by ReLU; scale and shift of replica s are at offset `stride` · s. If its moments are
// known, they are constants and not functions of the images.
struct Norm {
    const float *weight, *bias;
    int64_t stride;
    float* moments;  // mean and reciprocal standard deviation of each group, (N, groups, 2)
    int pixels, channels, groups;
    float eps;
    bool relu, known;

    static constexpr int ROWS = 4;  // of `channels` floats, the size of `room`

    // Compute a and b such that the norm of an image before ReLU is a · x + b.
    void line(int replica, const float* moment, float* a, float* b) const {
        int members = channels / groups;
        for (int c = 0; c < channels; c++) {
            a[c] = weight[replica * stride + c] * moment[2 * (c / members) + 1];
            b[c] = bias[replica * stride + c] - moment[2 * (c / members)] * a[c];
        }
    }

    // Compute the moments of image n, stored at x, unless they are known.
    void measure(const float* x, int n, float* room) const {
        if (known) return;
        int members = channels / groups;
        float *sums = room, *means = room + channels, *moment = moments + static_cast<int64_t>(n) * groups * 2;
        double count = static_cast<double>(members) * pixels;
        Vector total;
        for (int c = 0; c < channels; c += LANES) {
            sum_pixels<1>(pixels, [&](int p, Vector* value) { *value = load(x + p * channels + c); }, &total);
            store(sums + c, total);
        }
        for (int k = 0; k < groups; k++) {
            double sum = 0;
            for (int c = k * members; c < (k + 1) * members; c++) sum += sums[c];
            moment[2 * k] = static_cast<float>(sum / count);
        }
        for (int c = 0; c < channels; c++) means[c] = moment[2 * (c / members)];
        for (int c = 0; c < channels; c += LANES) {
            Vector mean = load(means + c);
            auto square = [&](int p, Vector* value) {
                Vector d = load(x + p * channels + c) - mean;
                *value = d * d;
            };
            sum_pixels<1>(pixels, square, &total);
            store(sums + c, total);
        }
        for (int k = 0; k < groups; k++) {
            double sum = 0;
            for (int c = k * members; c < (k + 1) * members; c++) sum += sums[c];
            // A variance that overflows must give NaN, not 0: the guard detects values that are not finite.
            moment[2 * k + 1] = std::isfinite(sum) ? static_cast<float>(1 / std::sqrt(sum / count + eps)) : NAN;
        }
    }

    // y = the norm of image n of a replica, stored at x, using its moments. In y, rows of `row` pixels are `apart`
    // pixels apart.
    void apply(const float* x, float* y, int row, int apart, int n, int replica, float* room) const {
        float *a = room, *b = room + channels;
        line(replica, moments + static_cast<int64_t>(n) * groups * 2, a, b);
        for (int start = 0; start < pixels; start += row, y += apart * channels)
            for (int c = 0; c < channels; c += LANES) {
                Vector by = load(a + c), plus = load(b + c);
                for (int p = 0; p < row; p++) {
                    Vector value = load(x + (start + p) * channels + c) * by + plus;
                    // Not a maximum, which would discard NaN.
                    store(y + p * channels + c, relu ? (value < 0 ? Vector{} : value) : value);
                }
            }
    }

    // Compute dx (+ plus) from g, the gradient w.r.t. the norm, and the image's gradients w.r.t. scale and shift,
    // `part` (2, C).
    void differentiate(const float* x, const float* g, const float* plus, float* dx, float* part, int n, int replica,
                       float* room) const {
        int members = channels / groups;
        const float *moment = moments + static_cast<int64_t>(n) * groups * 2, *scale = weight + replica * stride;
        float *a = room, *b = a + channels, *by_value = b + channels, *constant = by_value + channels;
        float *of_scale = part, *of_shift = part + channels;
        line(replica, moment, a, b);
        auto passed = [&](int p, int c, Vector value) {
            Vector incoming = load(g + p * channels + c);
            return relu ? (value * load(a + c) + load(b + c) > 0 ? incoming : Vector{}) : incoming;
        };
        for (int c = 0; c < channels; c++) constant[c] = moment[2 * (c / members)];
        for (int c = 0; c < channels; c += LANES) {
            Vector mean = load(constant + c), totals[2];
            auto terms = [&](int p, Vector values[2]) {
                Vector value = load(x + p * channels + c);
                values[0] = passed(p, c, value);
                values[1] = values[0] * (value - mean);
            };
            sum_pixels<2>(pixels, terms, totals);
            store(of_shift + c, totals[0]);
            store(of_scale + c, totals[1]);
        }
        for (int k = 0; k < groups; k++) {
            float deviation = moment[2 * k + 1];
            double with_value = 0, alone = 0, count = static_cast<double>(members) * pixels;
            for (int c = k * members; c < (k + 1) * members; c++) {
                of_scale[c] *= deviation;
                if (known) continue;
                with_value += static_cast<double>(scale[c]) * of_scale[c];
                alone += static_cast<double>(scale[c]) * of_shift[c];
            }
            // dx = a · g - deviation · (alone + normalised · with_value) / count
            for (int c = k * members; c < (k + 1) * members; c++) {
                by_value[c] = static_cast<float>(-deviation * deviation * with_value / count);
                constant[c] = static_cast<float>(-deviation * alone / count - moment[2 * k] * by_value[c]);
            }
        }
        for (int c = 0; c < channels; c += LANES) {
            Vector by_gradient = load(a + c), by = load(by_value + c), rest = load(constant + c);
            for (int p = 0; p < pixels; p++) {
                Vector value = load(x + p * channels + c);
                value = passed(p, c, value) * by_gradient + value * by + rest;
                store(dx + p * channels + c, plus ? value + load(plus + p * channels + c) : value);
            }
        }
    }
};

}  // namespace
