// 3×3 convolutions of few channels, and their gradients w.r.t. the filters, for many replicas at once.
//
// Images are stored channels last, (S·B, H, W, C), in bfloat16, or in float32 that is rounded to TF32 when read;
// filters are float32, (S, 3, 3, C, C); sums are accumulated in float32. A block of four warps processes one replica.
// It holds its share of the filters in registers and iterates over tiles of whole rows of pixels: each tile, with a
// halo of one pixel, is copied to shared memory once, while the previous one is computed; all nine taps read it there,
// each at a constant offset. Pixels are padded by a few bytes to avoid bank conflicts.

typedef unsigned short bf16;

constexpr int THREADS = 128;

__device__ __forceinline__ float low(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

// What differs between the two number formats. A product takes 32 bytes of a pixel's channels in both.
template <typename T>
struct Kind;

template <>
struct Kind<bf16> {
    static constexpr int DEPTH = 16;  // channels per product
    static constexpr int HEIGHT = 4;  // products along the pixels that a warp accumulates at a time

    // The part of the k-th half of the second factor that thread t of four holds; its rows are `next` elements apart.
    static __device__ __forceinline__ unsigned factor(const float* first, int next, int t, int k) {
        const float* at = first + (k * 8 + t * 2) * next;
        return pack(at[0], at[next]);
    }
    static __device__ __forceinline__ void round(unsigned (&)[4]) {}
    static __device__ __forceinline__ void add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        multiply(sums, a, b0, b1);
    }
    static __device__ __forceinline__ void plus(float (&four)[4], const bf16* from) {
        uint2 other = *reinterpret_cast<const uint2*>(from);
        four[0] += low(other.x), four[1] += high(other.x), four[2] += low(other.y), four[3] += high(other.y);
    }
    static __device__ __forceinline__ void store(bf16* to, const float (&four)[4]) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack(four[0], four[1]), pack(four[2], four[3]));
    }
};

template <>
struct Kind<float> {
    static constexpr int DEPTH = 8;
    static constexpr int HEIGHT = 2;

    static __device__ __forceinline__ unsigned factor(const float* first, int next, int t, int k) {
        return tf32(first[(k * 4 + t) * next]);
    }
    static __device__ __forceinline__ void round(unsigned (&numbers)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers[i] = tf32(__uint_as_float(numbers[i]));
    }
    static __device__ __forceinline__ void add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        multiply_tf32(sums, a, b0, b1);
    }
    static __device__ __forceinline__ void plus(float (&four)[4], const float* from) {
        float4 other = *reinterpret_cast<const float4*>(from);
        four[0] += other.x, four[1] += other.y, four[2] += other.z, four[3] += other.w;
    }
    static __device__ __forceinline__ void store(float* to, const float (&four)[4]) {
        *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
    }
};

// A tile of ROWS rows with its halo in shared memory: CHANNELS of the C channels of an image.
template <typename T, int CHANNELS, int C, int W, int ROWS, int SPARE>
struct Rimmed {
    static constexpr int PIECE = 16 / sizeof(T);  // elements in the 16 bytes that are fetched at a time
    static constexpr int PIXEL = CHANNELS * sizeof(T) + SPARE;
    static constexpr int LINE = (W + 2) * PIXEL;
    static constexpr int BYTES = (ROWS + 2) * LINE;
    static constexpr int PIECES = (ROWS + 2) * (W + 2) * (CHANNELS / PIECE);
    static constexpr int TURNS = (PIECES + THREADS - 1) / THREADS;

    static __device__ __forceinline__ void load(unsigned to, const T* image, int first, int height) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int piece = turn * THREADS + threadIdx.x;
            int pixel = piece / (CHANNELS / PIECE), part = piece % (CHANNELS / PIECE);
            int line = pixel / (W + 2), row = first + line - 1, column = pixel % (W + 2) - 1;
            bool inside = row >= 0 && row < height && column >= 0 && column < W;
            const T* from = inside ? image + (row * W + column) * C + part * PIECE : image;
            if (TURNS * THREADS == PIECES || piece < PIECES) fetch(to + pixel * PIXEL + part * 16, from, inside);
        }
    }
};

// y = x ∗ w (+ plus). If BACKWARD, x is the gradient w.r.t. the output and y that w.r.t. the input.
template <typename T, int C, int W, bool BACKWARD, bool PLUS>
__global__ void __launch_bounds__(THREADS)
convolve(const T* __restrict__ x, const float* __restrict__ w, const T* __restrict__ plus, T* __restrict__ y, int images,
         int height, int w_stride) {
    using Number = Kind<T>;
    constexpr int HEIGHT = Number::HEIGHT;
    constexpr int GROUPS = C / 16;                         // a warp computes 16 of the outputs …
    constexpr int PIXELS = 16 * HEIGHT * (4 / GROUPS);     // … for 16 · HEIGHT of a tile's pixels
    constexpr int ROWS = PIXELS / W;
    constexpr int STEPS = C / Number::DEPTH;
    using Tile = Rimmed<T, C, C, W, ROWS, 16>;
    __shared__ __align__(128) unsigned char memory[2][Tile::BYTES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, part = warp / GROUPS;
    const int g = lane / 4, t = lane % 4;
    const int replica = blockIdx.y, across = height / ROWS, tiles = images * across;
    const int begin = (long long)tiles * blockIdx.x / gridDim.x, end = (long long)tiles * (blockIdx.x + 1) / gridDim.x;
    x += (long long)replica * images * height * W * C;
    y += (long long)replica * images * height * W * C;
    if (PLUS) plus += (long long)replica * images * height * W * C;
    w += (long long)replica * w_stride;

    const unsigned base = shared_address(memory[0]);
    if (begin < end) Tile::load(base, x + (long long)(begin / across) * height * W * C, begin % across * ROWS, height);
    fetched();

    // The columns of the two products are interleaved so that each thread holds four adjacent outputs.
    unsigned filters[9][STEPS][2][2];
#pragma unroll
    for (int tap = 0; tap < 9; ++tap)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int out = group * 16 + (g >> 1) * 4 + half * 2 + (g & 1), in = step * Number::DEPTH;
                    const float* first = BACKWARD ? w + ((8 - tap) * C + out) * C + in : w + (tap * C + in) * C + out;
                    filters[tap][step][half][k] = Number::factor(first, BACKWARD ? 1 : C, t, k);
                }

    // Offset of this lane's row of the first factor, for the upper left tap.
    int offsets[HEIGHT];
#pragma unroll
    for (int m = 0; m < HEIGHT; ++m) {
        int pixel = (part * HEIGHT + m) * 16 + lane % 16;
        offsets[m] = pixel / W * Tile::LINE + pixel % W * Tile::PIXEL + lane / 16 * 16;
    }

    for (int tile = begin; tile < end; ++tile) {
        const unsigned here = base + (tile - begin) % 2 * Tile::BYTES, there = base + (tile - begin + 1) % 2 * Tile::BYTES;
        if (tile + 1 < end)
            Tile::load(there, x + (long long)((tile + 1) / across) * height * W * C, (tile + 1) % across * ROWS, height);
        fetched();
        await<1>();
        __syncthreads();
        float sums[HEIGHT][2][4] = {};
#pragma unroll
        for (int tap = 0; tap < 9; ++tap)
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int m = 0; m < HEIGHT; ++m) {
                    unsigned pixels[4];
                    load_matrices(pixels, here + offsets[m] + tap / 3 * Tile::LINE + tap % 3 * Tile::PIXEL + step * 32);
                    Number::round(pixels);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        Number::add(sums[m][half], pixels, filters[tap][step][half][0], filters[tap][step][half][1]);
                }
        const long long first = ((long long)(tile / across) * height + tile % across * ROWS) * W + part * HEIGHT * 16;
#pragma unroll
        for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                long long at = (first + m * 16 + below * 8 + g) * C + group * 16 + t * 4;
                float four[4] = {sums[m][0][below * 2], sums[m][0][below * 2 + 1], sums[m][1][below * 2],
                                 sums[m][1][below * 2 + 1]};
                if (PLUS) Number::plus(four, plus + at);
                Number::store(y + at, four);
            }
        __syncthreads();
    }
}

// The two factors of the gradient w.r.t. the filters, from shared memory: 16 input channels × pixels, pixels × 16
// outputs. `from` is the address of the first channel of the first pixel, `at(i)` the offset of the i-th pixel.
template <typename T>
struct Factors;

template <>
struct Factors<bf16> {
    static constexpr int DEPTH = 16;  // pixels per product
    static constexpr int SPARE = 16;

    template <typename At>
    static __device__ __forceinline__ void left(unsigned (&to)[4], unsigned from, int lane, At at) {
        load_transposed(to, from + at(lane / 16 * 8 + lane % 8) + lane / 8 % 2 * 16);
    }
    template <typename At>
    static __device__ __forceinline__ void right(unsigned (&to)[4], unsigned from, int lane, At at) {
        load_transposed(to, from + at(lane / 8 % 2 * 8 + lane % 8) + lane / 16 * 16);
    }
};

template <>
struct Factors<float> {
    static constexpr int DEPTH = 8;
    static constexpr int SPARE = 32;

    template <typename At>
    static __device__ __forceinline__ void left(unsigned (&to)[4], unsigned from, int lane, At at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = tf32(load_shared(from + at(i / 2 * 4 + lane % 4) + (i % 2 * 8 + lane / 4) * 4));
    }
    template <typename At>
    static __device__ __forceinline__ void right(unsigned (&to)[4], unsigned from, int lane, At at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = tf32(load_shared(from + at(i % 2 * 4 + lane % 4) + (i / 2 * 8 + lane / 4) * 4));
    }
};

// The gradient w.r.t. the filters, as partial sums (gridDim.x, S, 3, 3, C, C): over a block's tiles, for 16 of the
// inputs.
template <typename T, int C, int W>
__global__ void __launch_bounds__(THREADS)
filter_gradient(const T* __restrict__ x, const T* __restrict__ gradient, float* __restrict__ partial, int images,
                int height) {
    using Factor = Factors<T>;
    constexpr int GROUPS = C / 16;                  // a warp computes 16 of the outputs …
    constexpr int SHARES = 4 / GROUPS;              // … for one of this many shares of the pixels
    constexpr int PIXELS = (C == 64 ? 128 : 256) / sizeof(T);
    constexpr int ROWS = PIXELS / W;
    constexpr int STEPS = PIXELS / Factor::DEPTH / SHARES;
    constexpr int PIXEL = C * sizeof(T) + Factor::SPARE;
    constexpr int PIECE = 16 / sizeof(T);
    using Tile = Rimmed<T, 16, C, W, ROWS, Factor::SPARE>;
    constexpr int BYTES = Tile::BYTES + PIXELS * PIXEL;
    __shared__ __align__(128) unsigned char memory[2][BYTES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % GROUPS, share = warp / GROUPS;
    const int replica = blockIdx.y, slice = blockIdx.z, across = height / ROWS, tiles = images * across;
    const int begin = (long long)tiles * blockIdx.x / gridDim.x, end = (long long)tiles * (blockIdx.x + 1) / gridDim.x;
    x += (long long)replica * images * height * W * C + slice * 16;
    gradient += (long long)replica * images * height * W * C;
    const unsigned base = shared_address(memory[0]);

    auto load = [&](unsigned to, int tile) {
        Tile::load(to, x + (long long)(tile / across) * height * W * C, tile % across * ROWS, height);
        const T* from = gradient + ((long long)(tile / across) * height + tile % across * ROWS) * W * C;
#pragma unroll
        for (int turn = 0; turn < PIXELS * (C / PIECE) / THREADS; ++turn) {
            int piece = turn * THREADS + threadIdx.x;
            unsigned at = piece / (C / PIECE) * PIXEL + piece % (C / PIECE) * 16;
            fetch(to + Tile::BYTES + at, from + piece * PIECE, true);
        }
    };

    if (begin < end) load(base, begin);
    fetched();
    float sums[9][2][4] = {};
    for (int tile = begin; tile < end; ++tile) {
        const unsigned here = base + (tile - begin) % 2 * BYTES, there = base + (tile - begin + 1) % 2 * BYTES;
        if (tile + 1 < end) load(there, tile + 1);
        fetched();
        await<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int first = (share * STEPS + step) * Factor::DEPTH;
            unsigned right[4];
            Factor::right(right, here + Tile::BYTES + group * 16 * sizeof(T), lane,
                          [&](int pixel) { return (first + pixel) * PIXEL; });
#pragma unroll
            for (int tap = 0; tap < 9; ++tap) {
                unsigned left[4];
                Factor::left(left, here + tap / 3 * Tile::LINE + tap % 3 * Tile::PIXEL, lane, [&](int pixel) {
                    return (first + pixel) / W * Tile::LINE + (first + pixel) % W * Tile::PIXEL;
                });
                Kind<T>::add(sums[tap][0], left, right[0], right[1]);
                Kind<T>::add(sums[tap][1], left, right[2], right[3]);
            }
        }
        __syncthreads();
    }
    // The shares are added in a fixed order, through the shared memory of the tiles.
    static_assert(sizeof(sums) * 32 * (SHARES - 1) * GROUPS <= sizeof(memory), "the sums must fit");
    float* exchange = reinterpret_cast<float*>(memory[0]);
    if (share > 0)
#pragma unroll
        for (int place = 0; place < 72; ++place)
            exchange[(((share - 1) * GROUPS + group) * 72 + place) * 32 + lane] = sums[place / 8][place / 4 % 2][place % 4];
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int other = 0; other < SHARES - 1; ++other)
#pragma unroll
        for (int place = 0; place < 72; ++place)
            sums[place / 8][place / 4 % 2][place % 4] += exchange[((other * GROUPS + group) * 72 + place) * 32 + lane];
    partial += ((long long)blockIdx.x * gridDim.y + replica) * 9 * C * C;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                int at = (tap * C + slice * 16 + below * 8 + g) * C + group * 16 + half * 8 + t * 2;
                *reinterpret_cast<float2*>(partial + at) =
                    make_float2(sums[tap][half][below * 2], sums[tap][half][below * 2 + 1]);
            }
}
