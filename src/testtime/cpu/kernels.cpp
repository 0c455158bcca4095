// Convolution and GroupNorm of replicas on a CPU; see __init__.py for what they are for.
//
// Images lie with their channels last, (N, H, W, C), and N = S·B: the images of replica s are s·B … s·B + B - 1.
// Channels come in vectors of 16, so C is a multiple of 16. Every sum has an order of its own that depends on the sizes
// alone, never on the number of threads, so that results are the same bit for bit wherever they are computed.
//
// A GroupNorm in front of a convolution is computed image by image just before it, and again in the backward pass: what
// it gives stays in the cache and is never written to memory.

#include "winograd.h"

namespace {

// What a convolution works on. A unit is as many images of a replica as make a block of tiles, often a single one.
struct Job {
    const Norm* norm;  // in front of the convolution, or null
    const float* x;
    const float* w;  // (S, C, C, 3, 3), each replica's `stride` numbers behind the last one's
    int64_t stride;
    int replicas, images, height, width, threads;

    int per_unit() const { return (TILES + Tiling{1, height, width}.tiles() - 1) / Tiling{1, height, width}.tiles(); }
    int units() const { return (images + per_unit() - 1) / per_unit(); }
    int first(int unit) const { return unit * per_unit(); }
    Tiling tiling(int unit) const { return {std::min(per_unit(), images - first(unit)), height, width}; }
};

// Filters as the products want them, u (S, 16, C, C): [place][input][output], or transposed and turned by 180° for the
// gradient by the input. To be called by all threads.
template <int C>
void transform_filters(const Job& job, bool transposed, float* u) {
    constexpr int ROWS = C * (C / LANES);
    int step = transposed ? 9 * C : 9, lane_step = transposed ? 9 : 9 * C;
#pragma omp for schedule(static)
    for (int index = 0; index < job.replicas * ROWS; index++) {
        int s = index / ROWS, i = index % ROWS / (C / LANES), o = index % (C / LANES) * LANES;
        const float* filter = job.w + s * job.stride + i * step + o * lane_step;
        Vector taps[9], places[PLACES];
        for (int k = 0; k < 9; k++)
            for (int lane = 0; lane < LANES; lane++)
                taps[k][lane] = filter[lane * lane_step + (transposed ? 8 - k : k)];
        transform_filter(taps, places);
        float* to = u + static_cast<int64_t>(s) * PLACES * C * C + i * C + o;
        for (int k = 0; k < PLACES; k++) store(to + k * C * C, places[k]);
    }
}

// y = x ∗ u, plus something if given, for the images of a tiling; `room` is for 2 place<C>(16) numbers.
template <int C>
void convolve_unit(const Tiling& tiling, const float* x, const float* u, const float* plus, float* y, float* room) {
    float *v = room, *m = room + place<C>(PLACES);
    for (int block = 0; block < tiling.blocks(); block++) {
        transform_block<C, 4, transform_input>(tiling, block, x, v);
        for (int k = 0; k < PLACES; k++) multiply<C>(v + place<C>(k), u + k * C * C, m + place<C>(k));
        for (int tile = 0; tile < TILES; tile++) {
            auto at = tiling.locate(block * TILES + tile, 0);
            for (int o = 0; o < C; o += LANES) {
                Vector places[PLACES], out[4];
                for (int k = 0; k < PLACES; k++) places[k] = load(m + place<C>(k) + tile * C + o);
                transform_output(places, out);
                for (int k = 0; k < 4; k++) {
                    if (!at.inside(k / 2, k % 2)) continue;
                    int64_t to = at.pixel(k / 2, k % 2) * C + o;
                    store(y + to, plus ? out[k] + load(plus + to) : out[k]);
                }
            }
        }
    }
}

template <int C>
void convolve(const Job& job, const float* plus, float* y) {
    int units = job.units(), size = job.height * job.width * C;
    float* u = caller.get(static_cast<size_t>(job.replicas) * PLACES * C * C);
#pragma omp parallel num_threads(job.threads)
    {
        transform_filters<C>(job, false, u);
        float *products = worker.get(2 * place<C>(PLACES) + Norm::ROWS * C + static_cast<size_t>(job.per_unit()) * size);
        float *room = products + 2 * place<C>(PLACES), *normed = room + Norm::ROWS * C;
#pragma omp for schedule(static)
        for (int index = 0; index < job.replicas * units; index++) {
            int s = index / units, n = s * job.images + job.first(index % units);
            Tiling tiling = job.tiling(index % units);
            int64_t begin = static_cast<int64_t>(n) * size;
            const float* in = job.x + begin;
            for (int k = 0; job.norm && k < tiling.images; k++) {
                job.norm->measure(job.x + begin + k * size, n + k, room);
                job.norm->apply(job.x + begin + k * size, normed + k * size, n + k, s, room);
                in = normed;
            }
            const float* own = u + static_cast<int64_t>(s) * PLACES * C * C;
            convolve_unit<C>(tiling, in, own, plus ? plus + begin : nullptr, y + begin, products);
        }
    }
}

// Whatever of dx, dw and `norm_parts`, (N, 2, C), is not null. A replica's tiles are summed for dw in some parts, as
// many as make work for several threads; how many depends on the sizes alone, and with it the order of the sums.
template <int C>
void differentiate(const Job& job, const float* g, float* dx, float* dw, float* norm_parts) {
    constexpr int ROWS = C * (C / LANES), MATRICES = PLACES * C * C;
    int units = job.units(), size = job.height * job.width * C;
    int parts = std::clamp(Tiling{job.images, job.height, job.width}.tiles() / 128, 1, 8);
    float* u = caller.get(static_cast<size_t>(job.replicas) * (1 + parts) * MATRICES);  // (S, 16, C, C)
    float* partial = u + static_cast<size_t>(job.replicas) * MATRICES;  // (S, parts, 16, C, C)
#pragma omp parallel num_threads(job.threads)
    {
        if (dx) transform_filters<C>(job, true, u);
        size_t images = static_cast<size_t>(job.per_unit()) * size;
        float *products = worker.get(2 * place<C>(PLACES) + Norm::ROWS * C + 2 * images);
        float *v = products, *r = products + place<C>(PLACES), *room = r + place<C>(PLACES);
        float *normed = room + Norm::ROWS * C, *by_normed = normed + images;
#pragma omp for schedule(static)
        for (int index = 0; index < job.replicas * parts; index++) {
            int s = index / parts, part = index % parts;
            float* sums = partial + static_cast<int64_t>(index) * MATRICES;
            if (dw) std::fill(sums, sums + MATRICES, 0.0f);
            for (int unit = units * part / parts; unit < units * (part + 1) / parts; unit++) {
                int n = s * job.images + job.first(unit);
                Tiling tiling = job.tiling(unit);
                int64_t begin = static_cast<int64_t>(n) * size;
                const float* in = job.norm ? normed : job.x + begin;
                for (int k = 0; dw && job.norm && k < tiling.images; k++)
                    job.norm->apply(job.x + begin + k * size, normed + k * size, n + k, s, room);
                for (int block = 0; dw && block < tiling.blocks(); block++) {
                    transform_block<C, 4, transform_input>(tiling, block, in, v);
                    transform_block<C, 2, transform_gradient>(tiling, block, g + begin, r);
                    for (int k = 0; k < PLACES; k++)
                        accumulate<C>(v + place<C>(k), r + place<C>(k), sums + k * C * C);
                }
                if (!dx) continue;
                const float* own = u + static_cast<int64_t>(s) * MATRICES;
                convolve_unit<C>(tiling, g + begin, own, nullptr, job.norm ? by_normed : dx + begin, products);
                for (int k = 0; job.norm && k < tiling.images; k++)
                    job.norm->differentiate(job.x + begin + k * size, by_normed + k * size, dx + begin + k * size,
                                            norm_parts + static_cast<int64_t>(n + k) * 2 * C, n + k, s, room);
            }
        }
#pragma omp for schedule(static)
        for (int index = 0; index < (dw ? job.replicas * ROWS : 0); index++) {
            int s = index / ROWS, i = index % ROWS / (C / LANES), o = index % (C / LANES) * LANES;
            Vector p[PLACES] = {}, taps[9];
            for (int part = 0; part < parts; part++) {
                const float* sums = partial + static_cast<int64_t>(s * parts + part) * MATRICES + i * C + o;
                for (int k = 0; k < PLACES; k++) p[k] += load(sums + k * C * C);
            }
            transform_filter_gradient(p, taps);
            float* filter = dw + static_cast<int64_t>(s) * 9 * C * C + i * 9 + o * 9 * C;
            for (int k = 0; k < 9; k++)
                for (int lane = 0; lane < LANES; lane++) filter[lane * 9 * C + k] = taps[k][lane];
        }
    }
}

}  // namespace

extern "C" {

// y = GroupNorm(x), then ReLU if asked; fills in the moments.
void norm_forward(const Norm* norm, const float* x, float* y, int replicas, int images, int threads) {
    int64_t size = static_cast<int64_t>(norm->pixels) * norm->channels;
#pragma omp parallel num_threads(threads)
    {
        float* room = worker.get(Norm::ROWS * norm->channels);
#pragma omp for schedule(static)
        for (int n = 0; n < replicas * images; n++) {
            norm->measure(x + n * size, n, room);
            norm->apply(x + n * size, y + n * size, n, n / images, room);
        }
    }
}

// dx, and each image's part of the gradients by scale and shift, `parts` (N, 2, C).
void norm_backward(const Norm* norm, const float* x, const float* g, float* dx, float* parts, int replicas, int images,
                   int threads) {
    int64_t size = static_cast<int64_t>(norm->pixels) * norm->channels;
#pragma omp parallel num_threads(threads)
    {
        float* room = worker.get(Norm::ROWS * norm->channels);
#pragma omp for schedule(static)
        for (int n = 0; n < replicas * images; n++) {
            float* part = parts + static_cast<int64_t>(n) * 2 * norm->channels;
            norm->differentiate(x + n * size, g + n * size, dx + n * size, part, n, n / images, room);
        }
    }
}

void convolve_forward(const Job* job, int channels, const float* plus, float* y) {
    auto kernel = channels == 16   ? convolve<16>
                  : channels == 32 ? convolve<32>
                  : channels == 64 ? convolve<64>
                                   : convolve<128>;
    kernel(*job, plus, y);
}

void convolve_backward(const Job* job, int channels, const float* g, float* dx, float* dw, float* norm_parts) {
    auto kernel = channels == 16   ? differentiate<16>
                  : channels == 32 ? differentiate<32>
                  : channels == 64 ? differentiate<64>
                                   : differentiate<128>;
    kernel(*job, g, dx, dw, norm_parts);
}
}
