// What kernels here ask of a Hopper GPU, in words: barriers of copies, clusters, tensor cores, and kernels that start early.
// On a CPU `tests/workers/emulated.h` plays it.

__device__ inline u32 shared_memory() {
    extern __shared__ unsigned char shared[];
    return ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
}

// Kernels that were launched early

__device__ inline void kernels_before_are_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Barriers, of copies and of who uses what they bring

__device__ inline void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barriers_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
}

__device__ inline void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ inline void warp_meets() { __syncwarp(); }

// Clusters

__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ inline u32 in_program(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

__device__ inline void store_far(u32 at, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

__device__ inline void store_four_far(u32 at, const float* f) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3])
                 : "memory");
}

__device__ inline float loaded_near(u32 at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

// Tensor cores

// A tile in shared memory as they want it told: rows of 128 bytes, eight of them 1,024 apart, swizzled.
__device__ inline u64 described(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_are_asked_for() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// But for those asked for last.
__device__ inline void wait_for_products_before() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
__device__ inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Products that were waited for have written to d.
template <int N>
__device__ inline void written(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Products read a: it has its values before they begin, and keeps them until they are waited for.
template <int K>
__device__ inline void read(u32 (&a)[K][4]) {
#pragma unroll
    for (int i = 0; i < 4 * K; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

__device__ inline u32 rounded(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
