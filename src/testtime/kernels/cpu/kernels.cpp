// Convolution and GroupNorm of replicas on a CPU; see __init__.py for what they are for.
//
// Images lie with their channels last, (N, H, W, C), and N = S·B: the images of replica s are s·B … s·B + B - 1.
// C is a multiple of 16, and so of any vector. Every sum has an order of its own that depends on the sizes and on how
// wide vectors are, never on the number of threads, so that on one kind of processor results are the same bit for bit.
//
// Convolutions come in chains that a thread follows with a few images at a time, so that they stay in its cache. A
// GroupNorm in front of a convolution is computed just before it, and again in the backward pass: what it gives is
// never written to memory.

#include <numeric>
#include <type_traits>

#include "strided.h"
#include "winograd.h"

namespace {

// A 3×3 convolution, behind a GroupNorm or not.
struct Layer {
    Norm norm;  // without weight: none
    const float* w;  // (S, C, C, 3, 3), each replica's `stride` numbers behind the last one's
    int64_t stride;
};

// A chain of layers, each on the output of the one before. With `lead`, something from outside may be added to the
// output of the first. The others come in pairs, residual blocks: the input of a pair is added to its output.
//
// A unit is as many images of a replica as make a block of tiles, often a single one.
struct Chain {
    const Layer* layers;
    int count, lead, replicas, images, height, width, channels, threads;

    bool leads(int layer) const { return layer < lead; }
    bool ends_pair(int layer) const { return layer >= lead && (layer - lead) % 2 == 1; }
    // Of a tile, with the fewest products for these images.
    int side() const {
        int fours = Tiling{1, height, width, 4}.tiles() * Fours::PLACES;
        return fours < Tiling{1, height, width, 2}.tiles() * Pairs::PLACES ? 4 : 2;
    }
    int tiles() const { return Tiling{images, height, width, side()}.tiles(); }
    int per_unit() const { return (tiles_at_once(channels) * images + tiles() - 1) / tiles(); }
    int units() const { return (images + per_unit() - 1) / per_unit(); }
    Tiling tiling(int unit) const { return {std::min(per_unit(), images - unit * per_unit()), height, width, side()}; }
    // How many replicas are worked on at a time, where each makes some parts of work: as many as keep all threads busy.
    int at_once(int parts) const { return std::min(threads / std::gcd(threads, parts), replicas); }
    // Whether all replicas have the same filters, which are then transformed once.
    bool shared() const {
        return std::all_of(layers, layers + count, [](const Layer& layer) { return layer.stride == 0; });
    }
};

// Some units of one replica; they begin with `image`.
struct Part {
    int replica, first, end, image;

    Part(const Chain& chain, int replica, int part, int parts)
        : replica(replica), first(static_cast<int64_t>(chain.units()) * part / parts),
          end(static_cast<int64_t>(chain.units()) * (part + 1) / parts),
          image(replica * chain.images + first * chain.per_unit()) {}
};

// Filters as the products want them, u (replicas, layers, places, C, C): [place][input][output], or transposed and
// turned by 180° for the gradient by the input. To be called by all threads.
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

// The gradients by filters [tap][input][output] of sums over tiles [place][input][output].
template <class W, int C>
void finish_filters(const float* sums, float* taps) {
    for (int at = 0; at < C * C; at += LANES)
        transform<W::SIDE, 3, W::filter_gradient>(
            [=](int a, int b) { return load(sums + matrix<C>(a * W::SIDE + b) + at); },
            [=](int a, int b, Vector value) { store(taps + (a * 3 + b) * C * C + at, value); });
}

// y = the convolution of the frame with u, plus something if given; `room` is for a place more than the transform has:
// products are written where the tiles before them were read.
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

// The work of a chain on a unit of a replica's images.
template <class W, int C>
struct Unit {
    const Chain& chain;
    Tiling tiling;
    int size, replica, image;  // numbers of an image; the first image
    float* room;  // for Norm

    Unit(const Chain& chain, int replica, int unit, float* room)
        : chain(chain), tiling(chain.tiling(unit)), size(chain.height * chain.width * C), replica(replica),
          image(replica * chain.images + unit * chain.per_unit()), room(room) {}

    // Write the images to a frame, through the norm if there is one.
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

// y takes the output; `inner`, if it is not null, those of the layers before the last, (layers - 1, N, H, W, C). False
// if there is not the memory, as everywhere below.
template <class W, int C>
bool forward(const Chain& chain, const float* x, const float* plus, float* inner, float* y) {
    constexpr size_t MATRICES = matrix<C>(W::PLACES);
    int least = chain.replicas < chain.threads ? chain.threads : 1;
    int parts = std::clamp(std::max(least, chain.tiles() / 128), 1, chain.units());
    int size = chain.height * chain.width * C, at_once = chain.shared() ? chain.replicas : chain.at_once(parts);
    int sets = chain.shared() ? 1 : at_once;  // of filters
    int64_t whole = static_cast<int64_t>(chain.replicas) * chain.images * size;
    size_t unit_size = static_cast<size_t>(chain.per_unit()) * size;
    size_t part_size = (chain.units() / parts + 1) * unit_size;
    size_t frame_size = static_cast<size_t>(chain.per_unit()) * chain.tiling(0).framed() * C;
    size_t room_size = place<C>(W::PLACES + 1) + Norm::ROWS * C + frame_size + 2 * part_size;
    float* u = caller.get(static_cast<size_t>(sets) * chain.count * MATRICES);
    if (!u) return false;
    return work_together(chain.threads, room_size, [&](float* products) {
        float *room = products + place<C>(W::PLACES + 1), *frame = room + Norm::ROWS * C;
        float *middle = frame + frame_size, *between = middle + part_size;  // in a pair, and between pairs
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

// From the gradient g by the output, and the inner outputs: the gradient dx by the input; `dplus` by what was added
// from outside, where there is more than the one layer; dw by the filters, (layers, S, C, C, 3, 3); and each image's
// part of those by scale and shift, `norm_parts` (layers, N, 2, C). What is null is left out.
//
// A replica's tiles are summed for dw in parts; how many depends on the sizes alone, and with it the order of the sums.
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

// Call a function with the kind of tiles and the number of channels as types.
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

// y = GroupNorm(x), then ReLU if asked; fills in the moments.
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

// dx, and each image's part of the gradients by scale and shift, `parts` (N, 2, C).
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
