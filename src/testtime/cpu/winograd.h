// Winograd's F(2×2, 3×3) (Lavin & Gray 2016): a tile of 2×2 outputs comes from 4×4 inputs d as
// Aᵀ[(G w Gᵀ) ⊙ (Bᵀ d B)]A, with 16 products where the direct sum has 36. Summed over channels, each of the 16 places
// of a tile is a matrix product of its own; 16 tiles go through them together. The transforms only add, subtract and
// halve, so little is lost in rounding.

#pragma once

#include <algorithm>

#include "norm.h"

namespace {

constexpr int PLACES = 16, TILES = 16;
// How many vectors a product keeps in registers: of 32 that are as wide, or of fewer and narrower ones.
#if defined(__AVX512F__)
constexpr int KEPT = 16;
#else
constexpr int KEPT = 4;
#endif

// Where the transformed tiles of a place begin; the odd vector keeps places out of each other's cache sets.
template <int C>
constexpr size_t place(int index) {
    return static_cast<size_t>(index) * (TILES * C + LANES);
}

// ---------------------------------------------------------------------------------------------------------------------
// Transforms of one vector of channels
// ---------------------------------------------------------------------------------------------------------------------

// Bᵀ d B of 4×4 inputs.
inline void transform_input(const Vector d[16], Vector v[16]) {
    Vector r[16];
    for (int b = 0; b < 4; b++) {
        r[b] = d[b] - d[8 + b];
        r[4 + b] = d[4 + b] + d[8 + b];
        r[8 + b] = d[8 + b] - d[4 + b];
        r[12 + b] = d[4 + b] - d[12 + b];
    }
    for (int a = 0; a < 16; a += 4) {
        v[a] = r[a] - r[a + 2];
        v[a + 1] = r[a + 1] + r[a + 2];
        v[a + 2] = r[a + 2] - r[a + 1];
        v[a + 3] = r[a + 1] - r[a + 3];
    }
}

// Aᵀ m A, 2×2 outputs.
inline void transform_output(const Vector m[16], Vector y[4]) {
    Vector r[8];
    for (int b = 0; b < 4; b++) {
        r[b] = m[b] + m[4 + b] + m[8 + b];
        r[4 + b] = m[4 + b] - m[8 + b] - m[12 + b];
    }
    for (int a = 0; a < 2; a++) {
        y[2 * a] = r[4 * a] + r[4 * a + 1] + r[4 * a + 2];
        y[2 * a + 1] = r[4 * a + 1] - r[4 * a + 2] - r[4 * a + 3];
    }
}

// A g Aᵀ of 2×2 gradients by the outputs.
inline void transform_gradient(const Vector g[4], Vector v[16]) {
    Vector r[8] = {g[0], g[1], g[0] + g[2], g[1] + g[3], g[0] - g[2], g[1] - g[3], -g[2], -g[3]};
    for (int a = 0; a < 4; a++) {
        v[4 * a] = r[2 * a];
        v[4 * a + 1] = r[2 * a] + r[2 * a + 1];
        v[4 * a + 2] = r[2 * a] - r[2 * a + 1];
        v[4 * a + 3] = -r[2 * a + 1];
    }
}

// G w Gᵀ of 3×3 filters.
inline void transform_filter(const Vector w[9], Vector u[16]) {
    Vector r[12];
    for (int b = 0; b < 3; b++) {
        Vector ends = (w[b] + w[6 + b]) * 0.5f, middle = w[3 + b] * 0.5f;
        r[b] = w[b];
        r[3 + b] = ends + middle;
        r[6 + b] = ends - middle;
        r[9 + b] = w[6 + b];
    }
    for (int a = 0; a < 4; a++) {
        Vector ends = (r[3 * a] + r[3 * a + 2]) * 0.5f, middle = r[3 * a + 1] * 0.5f;
        u[4 * a] = r[3 * a];
        u[4 * a + 1] = ends + middle;
        u[4 * a + 2] = ends - middle;
        u[4 * a + 3] = r[3 * a + 2];
    }
}

// Gᵀ p G, 3×3 gradients by the filters.
inline void transform_filter_gradient(const Vector p[16], Vector w[9]) {
    Vector r[12];
    for (int b = 0; b < 4; b++) {
        Vector sum = (p[4 + b] + p[8 + b]) * 0.5f;
        r[b] = p[b] + sum;
        r[4 + b] = (p[4 + b] - p[8 + b]) * 0.5f;
        r[8 + b] = sum + p[12 + b];
    }
    for (int a = 0; a < 3; a++) {
        Vector sum = (r[4 * a + 1] + r[4 * a + 2]) * 0.5f;
        w[3 * a] = r[4 * a] + sum;
        w[3 * a + 1] = (r[4 * a + 1] - r[4 * a + 2]) * 0.5f;
        w[3 * a + 2] = sum + r[4 * a + 3];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles
// ---------------------------------------------------------------------------------------------------------------------

// The images of one replica, cut into tiles that are counted through all of them.
struct Tiling {
    int images, height, width;

    int rows() const { return (height + 1) / 2; }
    int columns() const { return (width + 1) / 2; }
    int tiles() const { return images * rows() * columns(); }
    int blocks() const { return (tiles() + TILES - 1) / TILES; }

    // Where the pixels of a tile lie, as a function of row and column from `margin` before the tile's first output.
    struct Place {
        int64_t first;  // the pixel at row and column 0, which may itself be outside
        int low, high, left, right, width;  // the rows and columns that are inside

        bool whole(int side) const { return low <= 0 && left <= 0 && high >= side && right >= side; }
        bool inside(int a, int b) const { return a >= low && a < high && b >= left && b < right; }
        int64_t pixel(int a, int b) const { return first + a * width + b; }
    };

    Place locate(int tile, int margin) const {
        int each = rows() * columns(), image = tile / each, row = tile % each / columns(), column = tile % columns();
        int top = 2 * row - margin, left = 2 * column - margin;
        int64_t first = (static_cast<int64_t>(image) * height + top) * width + left;
        return {first, -top, tile < tiles() ? height - top : -top, -left, width - left, width};
    }
};

// A block of tiles, transformed: to[place][tile][channel]. Pixels outside count as zero, and so do tiles past the end.
template <int C, int SIDE, void (*TRANSFORM)(const Vector*, Vector*)>
void transform_block(const Tiling& tiling, int block, const float* images, float* to) {
    for (int tile = 0; tile < TILES; tile++) {
        auto at = tiling.locate(block * TILES + tile, SIDE == 4 ? 1 : 0);
        bool whole = at.whole(SIDE);
        for (int c = 0; c < C; c += LANES) {
            Vector d[SIDE * SIDE], v[PLACES];
            const float* corner = images + at.first * C + c;
            if (whole) {
                for (int k = 0; k < SIDE * SIDE; k++)
                    d[k] = load(corner + (k / SIDE * at.width + k % SIDE) * C);
            } else {
                for (int k = 0; k < SIDE * SIDE; k++)
                    d[k] = at.inside(k / SIDE, k % SIDE) ? load(corner + (k / SIDE * at.width + k % SIDE) * C)
                                                         : Vector{};
            }
            TRANSFORM(d, v);
            for (int k = 0; k < PLACES; k++) store(to + place<C>(k) + tile * C + c, v[k]);
        }
    }
}

// How many vectors of a product's outputs are computed at a time, and for how many rows.
template <int C>
struct Kept {
    static constexpr int WIDE = std::min(C / LANES, 2), TALL = KEPT / WIDE;
};

// m[tile][output] = Σ v[tile][input] u[input][output]
template <int C>
void multiply(const float* v, const float* u, float* m) {
    constexpr int WIDE = Kept<C>::WIDE, TALL = Kept<C>::TALL;
    for (int o = 0; o < C; o += WIDE * LANES)
        for (int t = 0; t < TILES; t += TALL) {
            Vector sums[TALL][WIDE] = {};
            for (int i = 0; i < C; i++) {
                Vector row[WIDE];
                for (int q = 0; q < WIDE; q++) row[q] = load(u + i * C + o + q * LANES);
                for (int r = 0; r < TALL; r++)
                    for (int q = 0; q < WIDE; q++) sums[r][q] += v[(t + r) * C + i] * row[q];
            }
            for (int r = 0; r < TALL; r++)
                for (int q = 0; q < WIDE; q++) store(m + (t + r) * C + o + q * LANES, sums[r][q]);
        }
}

// p[input][output] += Σ v[tile][input] g[tile][output]
template <int C>
void accumulate(const float* v, const float* g, float* p) {
    constexpr int WIDE = Kept<C>::WIDE, TALL = Kept<C>::TALL;
    for (int o = 0; o < C; o += WIDE * LANES)
        for (int i = 0; i < C; i += TALL) {
            Vector sums[TALL][WIDE];
            for (int r = 0; r < TALL; r++)
                for (int q = 0; q < WIDE; q++) sums[r][q] = load(p + (i + r) * C + o + q * LANES);
            for (int t = 0; t < TILES; t++) {
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
