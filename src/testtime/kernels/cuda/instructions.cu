// One function per tensor core and memory instruction; tests/extras/emulated/cuda.h implements them for a CPU.

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// Copy 16 bytes from global to shared memory, or write 16 zeros.
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

__device__ __forceinline__ float load_shared(unsigned from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
    return value;
}

// sums (16×8) += a (16×16) b (16×8), in bfloat16
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sums (16×8) += a (16×8) b (8×8), in TF32
__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Round to the nearest TF32, the operand format of the instruction above.
__device__ __forceinline__ unsigned tf32(float value) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}

// Round two numbers to bfloat16, the first in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
