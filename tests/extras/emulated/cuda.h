// Enough of CUDA to run the blocks of src/testtime/kernels/cuda/*.cu on a CPU, one after the other.
//
// The threads of a block are fibers that take turns; they wait for their warp or their block where the hardware would.
// What a matrix instruction does to the registers of a warp is written out element by element.

#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n)

struct Place {
    int x, y, z;
};
struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

namespace emulated {

struct Barrier {
    int waiting = 0, turn = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
};

inline int current, count;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline Barrier block_barrier, warp_barriers[32];
inline unsigned char* shared;          // what shared addresses count from
inline unsigned slots[32][32][8];      // warp, lane, register
inline std::function<void()>* body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void wait(Barrier& barrier, int members) {
    int turn = barrier.turn;
    if (++barrier.waiting == members) {
        barrier.waiting = 0;
        ++barrier.turn;
        return;
    }
    while (barrier.turn == turn) yield();
}

inline void wait_for_warp() { wait(warp_barriers[current / 32], 32); }
inline int lane() { return current % 32; }
inline unsigned (*warp())[8] { return slots[current / 32]; }

inline void enter() {
    (*body)();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

inline void run_block(int threads, std::function<void()> work) {
    count = threads;
    body = &work;
    fibers.assign(threads, {});
    block_barrier = {};
    for (auto& barrier : warp_barriers) barrier = {};
    for (int i = 0; i < threads; ++i) {
        fibers[i].stack.resize(1 << 16);
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack.data();
        fibers[i].context.uc_stack.ss_size = fibers[i].stack.size();
        fibers[i].context.uc_link = &scheduler;
        makecontext(&fibers[i].context, enter, 0);
    }
    int left = threads;
    while (left > 0) {
        left = 0;
        for (current = 0; current < threads; ++current)
            if (!fibers[current].done) {
                swapcontext(&scheduler, &fibers[current].context);
                left += !fibers[current].done;
            }
    }
}

inline Place block_index, grid_size;

}  // namespace emulated

#define threadIdx (Place{emulated::current, 0, 0})
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size

// Threads that have left the kernel are not waited for, as on the hardware.
inline void __syncthreads() {
    int members = 0;
    for (auto& fiber : emulated::fibers) members += !fiber.done;
    emulated::wait(emulated::block_barrier, members);
}

inline unsigned shared_address(const void* place) {
    emulated::shared = static_cast<unsigned char*>(const_cast<void*>(place));
    return 0;
}

inline void fetch(unsigned to, const void* from, bool inside) {
    if (to % 16 || (inside && reinterpret_cast<uintptr_t>(from) % 16)) std::fprintf(stderr, "misaligned\n"), std::abort();
    inside ? (void)std::memcpy(emulated::shared + to, from, 16) : (void)std::memset(emulated::shared + to, 0, 16);
}

inline void fetched() {}
template <int PENDING>
inline void await() {}

template <bool TRANSPOSED>
inline void load(unsigned (&to)[4], unsigned from) {
    if (from % 16) std::fprintf(stderr, "misaligned\n"), std::abort();
    auto mine = emulated::warp();
    mine[emulated::lane()][7] = from;
    emulated::wait_for_warp();
    int g = emulated::lane() / 4, t = emulated::lane() % 4;
    for (int matrix = 0; matrix < 4; ++matrix) {
        auto row = [&](int r) { return emulated::shared + mine[matrix * 8 + r][7]; };
        if (TRANSPOSED) {
            uint16_t low, high;
            std::memcpy(&low, row(2 * t) + 2 * g, 2);
            std::memcpy(&high, row(2 * t + 1) + 2 * g, 2);
            to[matrix] = low | unsigned(high) << 16;
        } else {
            std::memcpy(&to[matrix], row(g) + 4 * t, 4);
        }
    }
    emulated::wait_for_warp();
}

inline void load_matrices(unsigned (&to)[4], unsigned from) { load<false>(to, from); }
inline void load_transposed(unsigned (&to)[4], unsigned from) { load<true>(to, from); }

inline float load_shared(unsigned from) {
    float value;
    std::memcpy(&value, emulated::shared + from, 4);
    return value;
}

inline float half_of(unsigned both, int which) { return __uint_as_float(which ? both & 0xffff0000u : both << 16); }

// Lay a product's factors open to the warp: registers 0 to 3 of a lane are the first's, 4 and 5 the second's.
inline auto show_factors(const unsigned (&a)[4], unsigned b0, unsigned b1) {
    auto mine = emulated::warp();
    auto own = mine[emulated::lane()];
    for (int i = 0; i < 4; ++i) own[i] = a[i];
    own[4] = b0, own[5] = b1;
    emulated::wait_for_warp();
    return mine;
}

// m16n8k16, bfloat16
inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    auto mine = show_factors(a, b0, b1);
    int g = emulated::lane() / 4, t = emulated::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 16; ++k) {
            float left = half_of(mine[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
            float right = half_of(mine[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
            sums[i] += left * right;
        }
    }
    emulated::wait_for_warp();
}

// m16n8k8, TF32
inline void multiply_tf32(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    auto mine = show_factors(a, b0, b1);
    int g = emulated::lane() / 4, t = emulated::lane() % 4;
    auto number = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000u); };
    for (int i = 0; i < 4; ++i) {
        int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 8; ++k)
            sums[i] += number(mine[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * number(mine[column * 4 + k % 4][4 + k / 4]);
    }
    emulated::wait_for_warp();
}

// To the nearest TF32, ties away from zero.
inline unsigned tf32(float value) { return (__float_as_uint(value) + 0x1000u) & 0xffffe000u; }

inline unsigned pack(float low, float high) {
    auto rounded = [](float value) {
        unsigned bits = __float_as_uint(value);
        return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}
