// Winograd convolutions (Lavin & Gray 2016): a tile of outputs is Aᵀ[(G w Gᵀ) ⊙ (Bᵀ d B)]A, where the tile of inputs,
// d, is larger by two on each side. Summed over channels, each element ("place") of a transformed tile is a separate
// matrix product, computed for several tiles at once. F(4×4, 3×3) needs 36 multiplications where the direct sum needs
// 144, F(2×2, 3×3) 16 instead of 36.

#pragma once

#include <algorithm>

#include "norm.h"

namespace {

#define ALWAYS_INLINE inline __attribute__((always_inline))  // so that vectors stay in registers

// Tiles per matrix product: more where the filters are too large for the cache.
constexpr int tiles_at_once(int channels) { return channels > 128 ? 32 : 8; }
template <int C>
constexpr int TILES = tiles_at_once(C);

constexpr int CHUNK = 32;  // inputs per partial sum, which reduces the rounding error

// ---------------------------------------------------------------------------------------------------------------------
// Transforms of one vector of channels along one axis
// ---------------------------------------------------------------------------------------------------------------------

// F(2, 3), which only adds, subtracts and halves, so the rounding error is small.
struct Pairs {
    static constexpr int OUTPUTS = 2, SIDE = 4, PLACES = SIDE * SIDE;

    // Bᵀ d
    ALWAYS_INLINE static void input(const Vector d[4], Vector v[4]) {
        v[0] = d[0] - d[2];
        v[1] = d[1] + d[2];
        v[2] = d[2] - d[1];
        v[3] = d[1] - d[3];
    }

    // Aᵀ m
    ALWAYS_INLINE static void output(const Vector m[4], Vector y[2]) {
        y[0] = m[0] + m[1] + m[2];
        y[1] = m[1] - m[2] - m[3];
    }

    // A g, for gradients w.r.t. the outputs
    ALWAYS_INLINE static void gradient(const Vector g[2], Vector v[4]) {
        v[0] = g[0];
        v[1] = g[0] + g[1];
        v[2] = g[0] - g[1];
        v[3] = -g[1];
    }

    // G w
    ALWAYS_INLINE static void filter(const Vector w[3], Vector u[4]) {
        Vector ends = (w[0] + w[2]) * 0.5f, middle = w[1] * 0.5f;
        u[0] = w[0];
        u[1] = ends + middle;
        u[2] = ends - middle;
        u[3] = w[2];
    }

    // Gᵀ p, the gradients w.r.t. the filters
    ALWAYS_INLINE static void filter_gradient(const Vector p[4], Vector w[3]) {
        Vector sum = (p[1] + p[2]) * 0.5f;
        w[0] = p[0] + sum;
        w[1] = (p[1] - p[2]) * 0.5f;
        w[2] = sum + p[3];
    }
};

// F(4, 3) with interpolation points 0, ±a, ±b and infinity. With the usual points, 1 and 2, the products differ so much
// in magnitude that the rounding error is twice as large; these and their squares are exact in float32.
struct Fours {
    static constexpr int OUTPUTS = 4, SIDE = 6, PLACES = SIDE * SIDE;
    static constexpr float a = 0.625f, b = 1.5f, aa = a * a, bb = b * b;
    static constexpr float of_zero = 1 / (aa * bb), of_a = 1 / (2 * aa * (aa - bb)), of_b = 1 / (2 * bb * (bb - aa));

    ALWAYS_INLINE static void input(const Vector d[6], Vector v[6]) {
        Vector even_a = d[4] - bb * d[2], odd_a = d[3] - bb * d[1];
        Vector even_b = d[4] - aa * d[2], odd_b = d[3] - aa * d[1];
        v[0] = aa * bb * d[0] + (d[4] - (aa + bb) * d[2]);
        v[1] = even_a + a * odd_a;
        v[2] = even_a - a * odd_a;
        v[3] = even_b + b * odd_b;
        v[4] = even_b - b * odd_b;
        v[5] = aa * bb * d[1] + (d[5] - (aa + bb) * d[3]);
    }

    ALWAYS_INLINE static void output(const Vector m[6], Vector y[4]) {
        Vector even_a = m[1] + m[2], odd_a = m[1] - m[2], even_b = m[3] + m[4], odd_b = m[3] - m[4];
        y[0] = m[0] + even_a + even_b;
        y[1] = a * odd_a + b * odd_b;
        y[2] = aa * even_a + bb * even_b;
        y[3] = a * aa * odd_a + b * bb * odd_b + m[5];
    }

    ALWAYS_INLINE static void gradient(const Vector g[4], Vector v[6]) {
        Vector even_a = g[0] + aa * g[2], odd_a = g[1] + aa * g[3];
        Vector even_b = g[0] + bb * g[2], odd_b = g[1] + bb * g[3];
        v[0] = g[0];
        v[1] = even_a + a * odd_a;
        v[2] = even_a - a * odd_a;
        v[3] = even_b + b * odd_b;
        v[4] = even_b - b * odd_b;
        v[5] = g[3];
    }

    ALWAYS_INLINE static void filter(const Vector w[3], Vector u[6]) {
        Vector even_a = w[0] + aa * w[2], even_b = w[0] + bb * w[2];
        u[0] = of_zero * w[0];
        u[1] = of_a * (even_a + a * w[1]);
        u[2] = of_a * (even_a - a * w[1]);
        u[3] = of_b * (even_b + b * w[1]);
        u[4] = of_b * (even_b - b * w[1]);
        u[5] = w[2];
    }

    ALWAYS_INLINE static void filter_gradient(const Vector p[6], Vector w[3]) {
        Vector even_a = of_a * (p[1] + p[2]), even_b = of_b * (p[3] + p[4]);
        w[0] = of_zero * p[0] + even_a + even_b;
        w[1] = a * of_a * (p[1] - p[2]) + b * of_b * (p[3] - p[4]);
        w[2] = aa * even_a + bb * even_b + p[5];
    }
};

// Apply a transform along both axes, reading with from(row, column) and writing with to(row, column, value).
template <int IN, int OUT, void (*LINE)(const Vector*, Vector*), typename From, typename To>
ALWAYS_INLINE void transform(From from, To to) {
    Vector half[OUT][IN];
    for (int column = 0; column < IN; column++) {
        Vector line[IN], out[OUT];
        for (int row = 0; row < IN; row++) line[row] = from(row, column);
        LINE(line, out);
        for (int row = 0; row < OUT; row++) half[row][column] = out[row];
    }
    for (int row = 0; row < OUT; row++) {
        Vector out[OUT];
        LINE(half[row], out);
        for (int column = 0; column < OUT; column++) to(row, column, out[column]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles
// ---------------------------------------------------------------------------------------------------------------------

// Offset of the transformed tiles of a place; the extra vector avoids conflicts between cache sets.
template <int C>
constexpr size_t place(int index) {
    return static_cast<size_t>(index) * (TILES<C> * C + LANES);
}

// Offset of the matrix of a place, of filters or of sums.
template <int C>
constexpr size_t matrix(int index) {
    return static_cast<size_t>(index) * (C * C + LANES);
}

// Images divided into tiles of `side`×`side` outputs, numbered across all images. Tiles are read from a frame: the
// images padded with zeros, by one at the top and left, and to whole tiles at the bottom and right.
struct Tiling {
    int images, height, width, side;

    int rows() const { return (height + side - 1) / side; }
    int columns() const { return (width + side - 1) / side; }
    int tiles() const { return images * rows() * columns(); }
    int blocks(int at_once) const { return (tiles() + at_once - 1) / at_once; }
    int wide() const { return columns() * side + 2; }
    int framed() const { return (rows() * side + 2) * wide(); }  // pixels of an image

    struct Place {
        int image, row, column;  // first pixel of a tile
    };

    Place locate(int tile) const {
        int each = rows() * columns();
        return {tile / each, tile % each / columns() * side, tile % columns() * side};
    }
};

// Transform a block of tiles to to[place][tile][channel]. Tiles past the end are zero.
template <int C, int IN, int OUT, void (*LINE)(const Vector*, Vector*)>
void transform_block(const Tiling& tiling, int block, const float* frame, float* to) {
    int wide = tiling.wide(), framed = tiling.framed(), first = block * TILES<C>;
    int count = std::min(TILES<C>, tiling.tiles() - first);
    for (int tile = 0; tile < count; tile++) {
        auto at = tiling.locate(first + tile);
        const float* corner = frame + (at.image * framed + at.row * wide + at.column) * C;
        for (int c = 0; c < C; c += LANES)
            transform<IN, OUT, LINE>(
                [=](int a, int b) { return load(corner + (a * wide + b) * C + c); },
                [=](int a, int b, Vector value) { store(to + place<C>(a * OUT + b) + tile * C + c, value); });
    }
    for (int k = 0; count < TILES<C> && k < OUT * OUT; k++)
        std::fill(to + place<C>(k) + count * C, to + place<C>(k) + TILES<C> * C, 0.0f);
}

// Vectors of a product's outputs, and rows, that are computed at a time.
template <int C>
struct Kept {
    static constexpr int WIDE = std::min(C / LANES, 2), TALL = std::min(TILES<C>, KEPT / WIDE);
};

// m[tile][output] = Σ v[tile][input] u[input][output]
template <int C>
void multiply(const float* v, const float* u, float* m) {
    constexpr int WIDE = Kept<C>::WIDE, TALL = Kept<C>::TALL;
    for (int o = 0; o < C; o += WIDE * LANES)
        for (int t = 0; t < TILES<C>; t += TALL)
            for (int first = 0; first < C; first += CHUNK) {
                Vector sums[TALL][WIDE] = {};
                for (int i = first; i < std::min(C, first + CHUNK); i++) {
                    Vector row[WIDE];
                    for (int q = 0; q < WIDE; q++) row[q] = load(u + i * C + o + q * LANES);
                    for (int r = 0; r < TALL; r++)
                        for (int q = 0; q < WIDE; q++) sums[r][q] += v[(t + r) * C + i] * row[q];
                }
                for (int r = 0; r < TALL; r++)
                    for (int q = 0; q < WIDE; q++) {
                        float* to = m + (t + r) * C + o + q * LANES;
                        store(to, first ? load(to) + sums[r][q] : sums[r][q]);
                    }
            }
}

// p[input][output] = Σ v[tile][input] g[tile][output], or += if `add`
template <int C>
void accumulate(const float* v, const float* g, float* p, bool add) {
    constexpr int WIDE = Kept<C>::WIDE, TALL = Kept<C>::TALL;
    for (int o = 0; o < C; o += WIDE * LANES)
        for (int i = 0; i < C; i += TALL) {
            Vector sums[TALL][WIDE];
            for (int r = 0; r < TALL; r++)
                for (int q = 0; q < WIDE; q++) sums[r][q] = add ? load(p + (i + r) * C + o + q * LANES) : Vector{};
            for (int t = 0; t < TILES<C>; t++) {
                Vector row[WIDE];
                for (int q = 0; q < WIDE; q++) row[q] = load(g + t * C + o + q * LANES);
                for (int r = 0; r < TALL; r++)
                    for (int q = 0; q < WIDE; q++) sums[r][q] += v[t * C + i + r] * row[q];
            }
            for (int r = 0; r < TALL; r++)
                for (int q = 0; q < WIDE; q++) store(p + (i + r) * C + o + q * LANES, sums[r][q]);
        }
}

}  // namespace
