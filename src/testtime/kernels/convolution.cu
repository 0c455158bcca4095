// 3×3 convolutions of few channels, and their gradients by the filters, for many replicas at once.
//
// Images are bfloat16 with their channels last, (S·B, H, W, C); filters float32, (S, 3, 3, C, C). A block of four warps
// works for one replica. It keeps its share of the filters in registers and goes through tiles of whole rows of pixels:
// a tile comes into shared memory once, with a rim of one pixel, while the last one is computed; all nine taps read it
// there, each at its own constant offset. A pixel takes 16 bytes more than its channels need, so that the eight rows a
// matrix load reads at a time lie in different banks.

typedef unsigned short bf16;

constexpr int THREADS = 128;

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// 16 bytes from global to shared memory, or 16 zeros.
__device__ __forceinline__ void fetch(unsigned to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void fetched() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void await() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// sums (16×8) += a (16×16) b (16×8)
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

// A tile of ROWS rows with its rim, as it lies in shared memory: CHANNELS of the C channels of an image.
template <int CHANNELS, int C, int W, int ROWS>
struct Rimmed {
    static constexpr int PIXEL = CHANNELS * 2 + 16;
    static constexpr int LINE = (W + 2) * PIXEL;
    static constexpr int BYTES = (ROWS + 2) * LINE;
    static constexpr int PIECES = (ROWS + 2) * (W + 2) * (CHANNELS / 8);
    static constexpr int TURNS = (PIECES + THREADS - 1) / THREADS;

    static __device__ __forceinline__ void load(unsigned to, const bf16* image, int first, int height) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int piece = turn * THREADS + threadIdx.x;
            int pixel = piece / (CHANNELS / 8), part = piece % (CHANNELS / 8);
            int line = pixel / (W + 2), row = first + line - 1, column = pixel % (W + 2) - 1;
            bool inside = row >= 0 && row < height && column >= 0 && column < W;
            const bf16* from = inside ? image + (row * W + column) * C + part * 8 : image;
            if (TURNS * THREADS == PIECES || piece < PIECES) fetch(to + pixel * PIXEL + part * 16, from, inside);
        }
    }
};

// y = x ∗ w (+ plus). Backward, x is the gradient by the output and y that by the input.
template <int C, int W, bool BACKWARD, bool PLUS>
__global__ void __launch_bounds__(THREADS)
convolve(const bf16* __restrict__ x, const float* __restrict__ w, const bf16* __restrict__ plus, bf16* __restrict__ y,
         int images, int height, int w_stride) {
    constexpr int GROUPS = C / 16;                // a warp has 16 of the outputs …
    constexpr int PIXELS = 64 * (4 / GROUPS);     // … and 64 of a tile's pixels
    constexpr int ROWS = PIXELS / W;
    constexpr int STEPS = C / 16;
    using Tile = Rimmed<C, C, W, ROWS>;
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

    // Columns of the two products are dealt so that a thread ends up with four neighbouring outputs.
    unsigned filters[9][STEPS][2][2];
#pragma unroll
    for (int tap = 0; tap < 9; ++tap)
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int out = group * 16 + (g >> 1) * 4 + half * 2 + (g & 1), in = step * 16 + k * 8 + t * 2;
                    const float* at = BACKWARD ? w + ((8 - tap) * C + out) * C + in : w + (tap * C + in) * C + out;
                    filters[tap][step][half][k] = pack(at[0], at[BACKWARD ? 1 : C]);
                }

    // Where this lane's row of the first product lies, for the tap at the upper left.
    int offsets[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        int pixel = part * 64 + m * 16 + lane % 16;
        offsets[m] = pixel / W * Tile::LINE + pixel % W * Tile::PIXEL + lane / 16 * 16;
    }

    for (int tile = begin; tile < end; ++tile) {
        const unsigned here = base + (tile - begin) % 2 * Tile::BYTES, there = base + (tile - begin + 1) % 2 * Tile::BYTES;
        if (tile + 1 < end)
            Tile::load(there, x + (long long)((tile + 1) / across) * height * W * C, (tile + 1) % across * ROWS, height);
        fetched();
        await<1>();
        __syncthreads();
        float sums[4][2][4] = {};
#pragma unroll
        for (int tap = 0; tap < 9; ++tap)
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    unsigned pixels[4];
                    load_matrices(pixels, here + offsets[m] + tap / 3 * Tile::LINE + tap % 3 * Tile::PIXEL + step * 32);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        multiply(sums[m][half], pixels, filters[tap][step][half][0], filters[tap][step][half][1]);
                }
        const long long first = ((long long)(tile / across) * height + tile % across * ROWS) * W + part * 64;
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                long long at = (first + m * 16 + below * 8 + g) * C + group * 16 + t * 4;
                float a = sums[m][0][below * 2], b = sums[m][0][below * 2 + 1];
                float c = sums[m][1][below * 2], d = sums[m][1][below * 2 + 1];
                if (PLUS) {
                    uint2 other = *reinterpret_cast<const uint2*>(plus + at);
                    a += low(other.x), b += high(other.x), c += low(other.y), d += high(other.y);
                }
                *reinterpret_cast<uint2*>(y + at) = make_uint2(pack(a, b), pack(c, d));
            }
        __syncthreads();
    }
}

// The gradient by the filters, as partial sums (gridDim.x, S, 3, 3, C, C): over this block's tiles, for 16 of the inputs.
template <int C, int W>
__global__ void __launch_bounds__(THREADS)
filter_gradient(const bf16* __restrict__ x, const bf16* __restrict__ gradient, float* __restrict__ partial, int images,
                int height) {
    constexpr int GROUPS = C / 16;                  // a warp has 16 of the outputs …
    constexpr int SHARES = 4 / GROUPS;              // … and one of so many shares of the pixels
    constexpr int PIXELS = C == 64 ? 64 : 128;
    constexpr int ROWS = PIXELS / W;
    constexpr int STEPS = PIXELS / 16 / SHARES;
    constexpr int PIXEL = C * 2 + 16;
    using Tile = Rimmed<16, C, W, ROWS>;
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
        const bf16* from = gradient + ((long long)(tile / across) * height + tile % across * ROWS) * W * C;
#pragma unroll
        for (int turn = 0; turn < PIXELS * (C / 8) / THREADS; ++turn) {
            int piece = turn * THREADS + threadIdx.x;
            fetch(to + Tile::BYTES + piece / (C / 8) * PIXEL + piece % (C / 8) * 16, from + piece * 8, true);
        }
    };

    if (begin < end) load(base, begin);
    fetched();
    float sums[9][2][4] = {};
    const int row = lane % 8, matrix = lane / 8;
    for (int tile = begin; tile < end; ++tile) {
        const unsigned here = base + (tile - begin) % 2 * BYTES, there = base + (tile - begin + 1) % 2 * BYTES;
        if (tile + 1 < end) load(there, tile + 1);
        fetched();
        await<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int first = (share * STEPS + step) * 16;
            unsigned right[4];
            load_transposed(right, here + Tile::BYTES + (first + matrix % 2 * 8 + row) * PIXEL + group * 32 + matrix / 2 * 16);
            const int pixel = first + matrix / 2 * 8 + row;
            const unsigned corner = here + pixel / W * Tile::LINE + pixel % W * Tile::PIXEL + matrix % 2 * 16;
#pragma unroll
            for (int tap = 0; tap < 9; ++tap) {
                unsigned left[4];
                load_transposed(left, corner + tap / 3 * Tile::LINE + tap % 3 * Tile::PIXEL);
                multiply(sums[tap][0], left, right[0], right[1]);
                multiply(sums[tap][1], left, right[2], right[3]);
            }
        }
        __syncthreads();
    }
    // The shares are added in their order, through the memory that the tiles no longer need.
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
