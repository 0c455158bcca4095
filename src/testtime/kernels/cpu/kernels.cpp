// Convolution and GroupNorm of replicas on a CPU; see __init__.py.
//
// Images are stored channels last, (N, H, W, C), with N = S·B: the images of replica s are s·B … s·B + B - 1. C is a
// multiple of 16, and so of the vector width. The order of every sum depends on the sizes and the vector width, never
// on the number of threads, so that results on one kind of processor are reproducible bit for bit.
//
// Convolutions form chains, through which a thread passes a few images at a time, so that they stay in its cache. A
// GroupNorm before a convolution is fused with it and recomputed in the backward pass: its output is never written to
// memory.

#include <numeric>
#include <type_traits>

#include "strided.h"
#include "winograd.h"

namespace {

// A 3×3 convolution, optionally preceded by GroupNorm.
struct Layer {
    Norm norm;  // unused if its weight is null
    const float* w;  // (S, C, C, 3, 3), `stride` elements from one replica to the next
    int64_t stride;
};

// A sequence of layers. With `lead`, another tensor may be added to the output of the first. The others form pairs, the
// residual blocks: the input of a pair is added to its output.
//
// A unit is as many images of a replica as fill a block of tiles, often a single one.
struct Chain {
    const Layer* layers;
    int count, lead, replicas, images, height, width, channels, threads;

    bool leads(int layer) const { return layer < lead; }
    bool ends_pair(int layer) const { return layer >= lead && (layer - lead) % 2 == 1; }
    // Side of the tiles that need the fewest multiplications for these images.
    int side() const {
        int fours = Tiling{1, height, width, 4}.tiles() * Fours::PLACES;
        return fours < Tiling{1, height, width, 2}.tiles() * Pairs::PLACES ? 4 : 2;
    }
    int tiles() const { return Tiling{images, height, width, side()}.tiles(); }
    int per_unit() const { return (tiles_at_once(channels) * images + tiles() - 1) / tiles(); }
    int units() const { return (images + per_unit() - 1) / per_unit(); }
    Tiling tiling(int unit) const { return {std::min(per_unit(), images - unit * per_unit()), height, width, side()}; }
    // Replicas processed at a time, each divided into `parts`: as many as keep all threads busy.
    int at_once(int parts) const { return std::min(threads / std::gcd(threads, parts), replicas); }
    // Whether all replicas share their filters, which are then transformed once.
    bool shared() const {
        return std::all_of(layers, layers + count, [](const Layer& layer) { return layer.stride == 0; });
    }
};

// A range of units of one replica; `image` is the first image.
struct Part {
    int replica, first, end, image;

    Part(const Chain& chain, int replica, int part, int parts)
        : replica(replica), first(static_cast<int64_t>(chain.units()) * part / parts),
          end(static_cast<int64_t>(chain.units()) * (part + 1) / parts),
          image(replica * chain.images + first * chain.per_unit()) {}
};

// Transform filters to u (replicas, layers, places, C, C), [place][input][output]; transposed, and rotated by 180°, for
// the gradient w.r.t. the input. To be called by all threads.
template <class W, int C>
void transform_filters(const Chain& chain, int first, int replicas, bool transposed, float* u) {
    constexpr int ROWS = C * (C / LANES);
    int step = transposed ? 9 * C : 9, lane_step = transposed ? 9 : 9 * C;
#pragma omp for schedule(static)
    for (int index = 0; index < replicas * chain.count * ROWS; index++) {
        int matrices = index / ROWS, i = index % ROWS / (C / LANES), o = index % (C / LANES) * LANES;
        const Layer& layer = chain.layers[matrices % chain.count];
        const float* filter = layer.w + (first + matrices / chain.count) * layer.stride + i * step + o * lane_step;
        Vector taps[9];
        for (int k = 0; k < 9; k++)
            for (int lane = 0; lane < LANES; lane++)
                taps[k][lane] = filter[lane * lane_step + (transposed ? 8 - k : k)];
        float* to = u + matrices * matrix<C>(W::PLACES) + i * C + o;
        transform<3, W::SIDE, W::filter>(
            [&](int a, int b) { return taps[3 * a + b]; },
            [&](int a, int b, Vector value) { store(to + matrix<C>(a * W::SIDE + b), value); });
    }
}

// Transform sums over tiles, [place][input][output], to the gradient w.r.t. the filters, [tap][input][output].
template <class W, int C>
void finish_filters(const float* sums, float* taps) {
    for (int at = 0; at < C * C; at += LANES)
        transform<W::SIDE, 3, W::filter_gradient>(
            [=](int a, int b) { return load(sums + matrix<C>(a * W::SIDE + b) + at); },
            [=](int a, int b, Vector value) { store(taps + (a * 3 + b) * C * C + at, value); });
}

// y = the convolution of the frame with u (+ plus). `room` has space for one place more than the transform: products
// overwrite the tiles of the previous place.
template <class W, int C>
void convolve_frame(const Tiling& tiling, const float* frame, const float* u, const float* plus, float* y,
                    float* room) {
    float *m = room, *v = room + place<C>(1);
    int height = tiling.height, width = tiling.width;
    for (int block = 0; block < tiling.blocks(TILES<C>); block++) {
        transform_block<C, W::SIDE, W::SIDE, W::input>(tiling, block, frame, v);
        for (int k = 0; k < W::PLACES; k++) multiply<C>(v + place<C>(k), u + matrix<C>(k), m + place<C>(k));
        for (int tile = 0; tile < std::min(TILES<C>, tiling.tiles() - block * TILES<C>); tile++) {
            auto at = tiling.locate(block * TILES<C> + tile);
            bool whole = at.row + W::OUTPUTS <= height && at.column + W::OUTPUTS <= width;
            int64_t first = (static_cast<int64_t>(at.image) * height + at.row) * width + at.column;
            for (int o = 0; o < C; o += LANES) {
                auto take = [=](int a, int b) { return load(m + place<C>(a * W::SIDE + b) + tile * C + o); };
                auto give = [=](int a, int b, Vector value) {
                    int64_t to = (first + a * width + b) * C + o;
                    store(y + to, plus ? value + load(plus + to) : value);
                };
                if (whole)
                    transform<W::SIDE, W::OUTPUTS, W::output>(take, give);
                else
                    transform<W::SIDE, W::OUTPUTS, W::output>(take, [=](int a, int b, Vector value) {
                        if (at.row + a < height && at.column + b < width) give(a, b, value);
                    });
            }
        }
    }
}

// A unit of a replica's images, processed by a chain.
template <class W, int C>
struct Unit {
    const Chain& chain;
    Tiling tiling;
    int size, replica, image;  // elements of an image; index of the replica and of the first image
    float* room;  // scratch memory of Norm

    Unit(const Chain& chain, int replica, int unit, float* room)
        : chain(chain), tiling(chain.tiling(unit)), size(chain.height * chain.width * C), replica(replica),
          image(replica * chain.images + unit * chain.per_unit()), room(room) {}

    // Write the images to a frame, normalised if there is a norm.
    void frame(const float* images, const Norm* norm, float* to) const {
        int wide = tiling.wide();
        for (int n = 0; n < tiling.images; n++) {
            const float* from = images + n * size;
            float* first = to + (n * tiling.framed() + wide + 1) * C;
            if (norm)
                norm->apply(from, first, chain.width, wide, image + n, replica, room);
            else
                for (int row = 0; row < chain.height; row++)
                    std::copy_n(from + row * chain.width * C, chain.width * C, first + row * wide * C);
        }
    }

    void measure(const float* images, const Norm& norm) const {
        for (int n = 0; n < tiling.images; n++) norm.measure(images + n * size, image + n, room);
    }
};

// Write the output to y and, if `inner` is not null, the outputs of the layers before the last to it, (layers - 1, N,
// H, W, C). Returns false if memory is insufficient, as do all functions below.
template <class W, int C>
bool forward(const Chain& chain, const float* x, const float* plus, float* inner, float* y) {
    constexpr size_t MATRICES = matrix<C>(W::PLACES);
    int least = chain.replicas < chain.threads ? chain.threads : 1;
    int parts = std::clamp(std::max(least, chain.tiles() / 128), 1, chain.units());
    int size = chain.height * chain.width * C, at_once = chain.shared() ? chain.replicas : chain.at_once(parts);
    int sets = chain.shared() ? 1 : at_once;  // sets of filters
    int64_t whole = static_cast<int64_t>(chain.replicas) * chain.images * size;
    size_t unit_size = static_cast<size_t>(chain.per_unit()) * size;
    size_t part_size = (chain.units() / parts + 1) * unit_size;
    size_t frame_size = static_cast<size_t>(chain.per_unit()) * chain.tiling(0).framed() * C;
    size_t room_size = place<C>(W::PLACES + 1) + Norm::ROWS * C + frame_size + 2 * part_size;
    float* u = caller.get(static_cast<size_t>(sets) * chain.count * MATRICES);
    if (!u) return false;
    return work_together(chain.threads, room_size, [&](float* products) {
        float *room = products + place<C>(W::PLACES + 1), *frame = room + Norm::ROWS * C;
        float *middle = frame + frame_size, *between = middle + part_size;  // within a pair, and between pairs
        std::fill_n(frame, frame_size, 0.0f);
        for (int start = 0; start < chain.replicas; start += at_once) {
            int replicas = std::min(at_once, chain.replicas - start);
            transform_filters<W, C>(chain, start, std::min(replicas, sets), false, u);
#pragma omp for schedule(static)
            for (int index = 0; index < replicas * parts; index++) {
                Part part(chain, start + index / parts, index % parts, parts);
                int64_t begin = static_cast<int64_t>(part.image) * size;
                const float *in = x + begin, *block = in;
                for (int l = 0; l < chain.count; l++) {
                    const Norm& norm = chain.layers[l].norm;
                    const float* own = u + (static_cast<int64_t>(index / parts % sets) * chain.count + l) * MATRICES;
                    const float* add = chain.ends_pair(l) ? block : chain.leads(l) && plus ? plus + begin : nullptr;
                    if (!chain.ends_pair(l)) block = in;
                    float* out = l == chain.count - 1     ? y + begin
                                 : inner                  ? inner + l * whole + begin
                                 : chain.ends_pair(l + 1) ? middle
                                                          : between;
                    for (int number = part.first; number < part.end; number++) {
                        Unit<W, C> unit(chain, part.replica, number, room);
                        int64_t at = (number - part.first) * unit_size;
                        if (norm.weight) unit.measure(in + at, norm);
                        unit.frame(in + at, norm.weight ? &norm : nullptr, frame);
                        convolve_frame<W, C>(unit.tiling, frame, own, add ? add + at : nullptr, out + at, products);
                    }
                    in = out;
                }
            }
        }
    });
}

// From the gradient g w.r.t. the output and the inner outputs, compute the gradients w.r.t. the input, dx; the added
// tensor, `dplus`, if there is more than one layer; the filters, dw (layers, S, C, C, 3, 3); and each image's share of
// those w.r.t. scale and shift, `norm_parts` (layers, N, 2, C). Null outputs are skipped.
//
// For dw, a replica's tiles are summed in parts, whose number, and so the order of the sums, depends only on the sizes.
template <class W, int C>
bool backward(const Chain& chain, const float* x, const float* inner, const float* g, float* dx, float* dplus,
              float* dw, float* norm_parts) {
    constexpr int ROWS = C * (C / LANES), TAPS = 9 * C * C;
    constexpr size_t MATRICES = matrix<C>(W::PLACES);
    int parts = std::clamp(chain.tiles() / 32, 1, std::min(chain.units(), 16));
    int size = chain.height * chain.width * C, at_once = chain.at_once(parts), sets = chain.shared() ? 1 : at_once;
    int64_t whole = static_cast<int64_t>(chain.replicas) * chain.images * size;
    size_t unit_size = static_cast<size_t>(chain.per_unit()) * size;
    size_t part_size = (chain.units() / parts + 1) * unit_size;
    size_t frame_size = static_cast<size_t>(chain.per_unit()) * chain.tiling(0).framed() * C;
    float* u = caller.get(static_cast<size_t>(sets) * chain.count * MATRICES +
                          static_cast<size_t>(at_once) * parts * chain.count * TAPS);
    if (!u) return false;
    float* partial = u + static_cast<size_t>(sets) * chain.count * MATRICES;  // (replicas, parts, layers, 9, C, C)
    size_t frames = chain.units() / parts + 1;
    size_t room_size = 2 * place<C>(W::PLACES) + MATRICES + Norm::ROWS * C + (frames + 1) * frame_size + unit_size +
                       2 * part_size;
    return work_together(chain.threads, room_size, [&](float* products) {
        float *v = products, *r = products + place<C>(W::PLACES), *sums = r + place<C>(W::PLACES);
        float *room = sums + MATRICES, *frame = room + Norm::ROWS * C, *by_frames = frame + frame_size;
        float *by_normed = by_frames + frames * frame_size, *middle = by_normed + unit_size;
        float* between = middle + part_size;
        std::fill_n(frame, (frames + 1) * frame_size, 0.0f);
        for (int start = 0; start < chain.replicas; start += at_once) {
            int replicas = std::min(at_once, chain.replicas - start);
            if (start == 0 || !chain.shared()) transform_filters<W, C>(chain, start, std::min(replicas, sets), true, u);
#pragma omp for schedule(static)
            for (int index = 0; index < replicas * parts; index++) {
                Part part(chain, start + index / parts, index % parts, parts);
                int64_t begin = static_cast<int64_t>(part.image) * size;
                const float *by_out = g + begin, *by_block = by_out;
                for (int l = chain.count - 1; l >= 0; l--) {
                    const Norm& norm = chain.layers[l].norm;
                    const float* in = l ? inner + (l - 1) * whole + begin : x + begin;
                    const float* own = u + (static_cast<int64_t>(index / parts % sets) * chain.count + l) * MATRICES;
                    bool starts_pair = !chain.leads(l) && !chain.ends_pair(l);
                    if (chain.ends_pair(l)) by_block = by_out;
                    float* by_in = l == 0                     ? (dx ? dx + begin : nullptr)
                                   : chain.ends_pair(l)       ? middle
                                   : l == chain.lead && dplus ? dplus + begin
                                                              : between;
                    for (int number = part.first; number < part.end; number++) {
                        Unit<W, C> unit(chain, part.replica, number, room);
                        int64_t at = (number - part.first) * unit_size;
                        float* by_frame = by_frames + (number - part.first) * frame_size;
                        unit.frame(by_out + at, nullptr, by_frame);
                        if (!dw) continue;
                        unit.frame(in + at, norm.weight ? &norm : nullptr, frame);
                        const float* by_first = by_frame + (unit.tiling.wide() + 1) * C;
                        for (int block = 0; block < unit.tiling.blocks(TILES<C>); block++) {
                            transform_block<C, W::SIDE, W::SIDE, W::input>(unit.tiling, block, frame, v);
                            transform_block<C, W::OUTPUTS, W::SIDE, W::gradient>(unit.tiling, block, by_first, r);
                            for (int k = 0; k < W::PLACES; k++)
                                accumulate<C>(v + place<C>(k), r + place<C>(k), sums + matrix<C>(k),
                                              block || number > part.first);
                        }
                    }
                    int64_t place_of_taps = (static_cast<int64_t>(index) * chain.count + l) * TAPS;
                    if (dw) finish_filters<W, C>(sums, partial + place_of_taps);
                    for (int number = part.first; by_in && number < part.end; number++) {
                        Unit<W, C> unit(chain, part.replica, number, room);
                        int64_t at = (number - part.first) * unit_size;
                        convolve_frame<W, C>(unit.tiling, by_frames + (number - part.first) * frame_size, own, nullptr,
                                             norm.weight ? by_normed : by_in + at, products);
                        for (int k = 0; norm.weight && k < unit.tiling.images; k++)
                            norm.differentiate(in + at + k * size, by_normed + k * size,
                                               starts_pair ? by_block + at + k * size : nullptr, by_in + at + k * size,
                                               norm_parts + (l * whole / size + unit.image + k) * 2 * C, unit.image + k,
                                               part.replica, room);
                    }
                    by_out = by_in;
                }
            }
#pragma omp for schedule(static)
            for (int index = 0; index < (dw ? replicas * chain.count * ROWS : 0); index++) {
                int replica = index / ROWS / chain.count, l = index / ROWS % chain.count;
                int i = index % ROWS / (C / LANES), o = index % (C / LANES) * LANES;
                Vector taps[9] = {};
                for (int part = 0; part < parts; part++) {
                    int64_t matrices = static_cast<int64_t>(replica * parts + part) * chain.count + l;
                    for (int k = 0; k < 9; k++) taps[k] += load(partial + matrices * TAPS + (k * C + i) * C + o);
                }
                float* filter = dw + (static_cast<int64_t>(l) * chain.replicas + start + replica) * TAPS;
                for (int lane = 0; lane < LANES; lane++)
                    for (int k = 0; k < 9; k++) filter[((o + lane) * C + i) * 9 + k] = taps[k][lane];
            }
        }
    });
}

// Call a function with the tile type and the number of channels as compile-time constants.
template <typename Function>
bool choose(const Chain& chain, Function function) {
    auto with = [&](auto constant) {
        return chain.side() == 4 ? function(Fours{}, constant) : function(Pairs{}, constant);
    };
    if (chain.channels == 16) return with(std::integral_constant<int, 16>{});
    if (chain.channels == 32) return with(std::integral_constant<int, 32>{});
    if (chain.channels == 64) return with(std::integral_constant<int, 64>{});
    if (chain.channels == 128) return with(std::integral_constant<int, 128>{});
    return with(std::integral_constant<int, 256>{});
}

}  // namespace

extern "C" {

// y = GroupNorm(x), followed by ReLU if `relu`; writes the moments.
bool norm_forward(const Norm* norm, const float* x, float* y, int replicas, int images, int threads) {
    int64_t size = static_cast<int64_t>(norm->pixels) * norm->channels;
    return work_together(threads, Norm::ROWS * norm->channels, [&](float* room) {
#pragma omp for schedule(static)
        for (int n = 0; n < replicas * images; n++) {
            norm->measure(x + n * size, n, room);
            norm->apply(x + n * size, y + n * size, norm->pixels, norm->pixels, n, n / images, room);
        }
    });
}

// Compute dx, and each image's share of the gradients w.r.t. scale and shift, `parts` (N, 2, C).
bool norm_backward(const Norm* norm, const float* x, const float* g, float* dx, float* parts, int replicas, int images,
                   int threads) {
    int64_t size = static_cast<int64_t>(norm->pixels) * norm->channels;
    return work_together(threads, Norm::ROWS * norm->channels, [&](float* room) {
#pragma omp for schedule(static)
        for (int n = 0; n < replicas * images; n++) {
            float* part = parts + static_cast<int64_t>(n) * 2 * norm->channels;
            norm->differentiate(x + n * size, g + n * size, nullptr, dx + n * size, part, n, n / images, room);
        }
    });
}

bool chain_forward(const Chain* chain, const float* x, const float* plus, float* inner, float* y) {
    return choose(*chain, [&](auto tiles, auto constant) {
        return forward<decltype(tiles), decltype(constant)::value>(*chain, x, plus, inner, y);
    });
}

bool chain_backward(const Chain* chain, const float* x, const float* inner, const float* g, float* dx,
                    float* dplus, float* dw, float* norm_parts) {
    return choose(*chain, [&](auto tiles, auto constant) {
        return backward<decltype(tiles), decltype(constant)::value>(*chain, x, inner, g, dx, dplus, dw, norm_parts);
    });
}
}
