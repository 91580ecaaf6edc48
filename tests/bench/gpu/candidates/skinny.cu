// out [rows, columns] = x [rows, inputs] times the transpose of weight [columns, inputs], bfloat16, of few rows.
//
// A step of few tokens reads every weight once and computes little: what counts is that weights keep coming. So one
// thread asks the copy engine for tiles of the weight, as many ahead as shared memory holds, and begins before the
// kernel in front is done: weights depend on nobody. Only then it waits for that kernel and asks for x. Warp groups
// multiply what has come, 64 weight rows each, with all rows of x beside them.
//
// Compiled for one shape of tiles (macros below). Shared memory of a stage: TILES tiles of 64 weight rows x 64 inputs,
// then x's ROWS x 64, each row 128 bytes, swizzled as the copy engine does (128 bytes) and the tensor cores read.
//
//   ROWS     rows of x that a program multiplies, 16, 32, 64 or 128; those behind num_rows come as zeros
//   TILES    warp groups, each with a tile of 64 weight rows
//   STAGES   tiles on their way or in use
//   GATED    weight has 2 x columns rows, gates first; out is silu(gate) * up. Eight gates and their eight ups alternate
//            in a tile, so that a thread has both
//   PARTS    into how many parts the inputs are cut, a program each; they form a cluster and add up what they have, in
//            the order of the parts, through each other's shared memory
//   SHARING  1, or 2 neighbouring tiles' programs of a cluster: each fetches half of x, for both

#if GATED && PARTS > 1
#error "the rows of a gate and its up may end in two parts"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int INPUTS = 64;  // of a stage
constexpr u32 TILE_BYTES = 64 * INPUTS * 2;
constexpr u32 X_BYTES = ROWS * INPUTS * 2;
constexpr u32 STAGE_BYTES = TILES * TILE_BYTES + X_BYTES;
constexpr int SUMS = ROWS / 2;  // of a thread: 64 x ROWS of a warp group
constexpr int WIDE = SUMS / PARTS < 4 ? 2 : 4;  // sums that move together
constexpr int PIECES = SUMS / WIDE;  // of a thread; each part adds up some of them
constexpr int CLUSTER = PARTS * SHARING;  // programs; those that share x are neighbours
constexpr int THREADS = TILES * 128;  // that multiply
constexpr int COLUMNS = (GATED ? 32 : 64) * TILES;  // of a program
constexpr u64 ONCE = 0x12F0000000000000;  // cache policies: evict first,
constexpr u64 OFTEN = 0x14F0000000000000;  // and last

#define CLUSTER_OF_SEVERAL (PARTS * SHARING > 1)

#ifdef EMULATED
#include "emulated.h"
#else
#if CLUSTER_OF_SEVERAL
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) __cluster_dims__(CLUSTER, 1, 1)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
#endif
#define MAP_PARAMETER const __grid_constant__ TensorMap

__device__ inline u32 shared_memory() {
    extern __shared__ unsigned char shared[];
    return ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
}

__device__ inline void barriers_are_made() {
    if (threadIdx.x == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
}

__device__ inline void kernels_before_are_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void warp_meets() { __syncwarp(); }
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ inline void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of another program, or of this one.
__device__ inline void arrive_far(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
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

__device__ inline void load_weight(u32 to, const TensorMap* map, int input, int tile, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(input),
        "r"(GATED ? 0 : tile * TILES * 64), "r"(0), "r"(GATED ? tile * TILES * 4 : 0), "r"(barrier), "l"(ONCE)
        : "memory");
}

// Some rows of x, into this program's shared memory and, in a cluster that shares, its neighbour's.
__device__ inline void load_x(u32 to, const TensorMap* map, int input, int row, u32 barrier, int programs) {
#if SHARING > 1
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(barrier),
        "h"((unsigned short)programs), "l"(OFTEN)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(barrier), "l"(OFTEN)
        : "memory");
#endif
}

// A tile in shared memory as the tensor cores want it told: rows of 128 bytes, eight of them 1,024 apart, swizzled.
__device__ inline u64 described(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)

// d [64 weight rows, ROWS] += tile [64, 16 inputs] times x [ROWS, 16 inputs], transposed
__device__ inline void multiply(float (&d)[SUMS], u32 tile_at, u32 x_at) {
    const u64 tile = described(tile_at), x = described(x_at);
#if ROWS == 16
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
        : F4(0), F4(4) : "l"(tile), "l"(x));
#elif ROWS == 32
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        : F16(0) : "l"(tile), "l"(x));
#elif ROWS == 64
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : F16(0), F16(16) : "l"(tile), "l"(x));
#else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"
        : F16(0), F16(16), F16(32), F16(48) : "l"(tile), "l"(x));
#endif
}

__device__ inline unsigned short rounded(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#if CLUSTER_OF_SEVERAL
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ inline void meet() {
    arrive_at_cluster();
    wait_for_cluster();
}

__device__ inline u32 in_program(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// A piece of sums, to another program.
__device__ inline void store_far(u32 at, const float* f) {
    if (WIDE == 4)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(f[0]), "f"(f[1]),
                     "f"(f[WIDE / 2]), "f"(f[WIDE - 1]) : "memory");
    else
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(f[0]), "f"(f[1]) : "memory");
}

__device__ inline float loaded_near(u32 at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}

#endif

#endif  // EMULATED

// The first of a part's pieces.
__device__ constexpr int first_piece(int part) { return part * PIECES / PARTS; }

__device__ constexpr int part_of(int piece) { return ((piece + 1) * PARTS - 1) / PIECES; }

__device__ inline float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

struct Place {
    int stage = 0;
    u32 parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

#if PARTS > 1
// Leave in this part's pieces of d their sums over all parts. `room`: shared memory for as many pieces of every
// thread of every part.
__device__ inline void add_up(float (&d)[SUMS], int part, u32 room) {
    constexpr int MOST_PIECES = (PIECES + PARTS - 1) / PARTS;  // of a part
    constexpr u32 apart = THREADS * WIDE * 4;  // pieces of one thread
    const u32 mine = room + threadIdx.x * WIDE * 4;
    u32 there[PARTS];
#pragma unroll
    for (int to = 0; to < PARTS; ++to)
        there[to] = in_program(mine, to * SHARING + blockIdx.x % SHARING) + part * MOST_PIECES * apart;
    meet();  // nobody reads tiles from shared memory any more
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int to = part_of(piece);
        if (to != part) store_far(there[to] + (piece - first_piece(to)) * apart, d + piece * WIDE);
    }
    meet();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int own = part_of(i / WIDE);
        if (own != part) continue;
        const u32 at = mine + (i / WIDE - first_piece(own)) * apart + i % WIDE * 4;
        float total = 0.0f;
#pragma unroll
        for (int from = 0; from < PARTS; ++from)
            total += from == own ? d[i] : loaded_near(at + from * MOST_PIECES * apart);
        d[i] = total;
    }
}
#endif

// What one thread has copied to where the others multiply it.
struct Loading {
    u32 stages, full, empty;
    const TensorMap *weight_map, *x_map;
    int first_tile, last_tile, stride, first_step, num_steps;
    int neighbour, programs;  // which of those that share x this is, and all of them, a bit each

    __device__ inline int ahead() const { return first_tile <= last_tile ? min(STAGES, num_steps) : 0; }

    __device__ inline void weight(int tile, int step, int stage) const {
        expect_bytes(full + 8 * stage, STAGE_BYTES);
        load_weight(stages + stage * STAGE_BYTES, weight_map, (first_step + step) * INPUTS, tile, full + 8 * stage);
    }

    // Weights depend on no other kernel, and on no other program.
    __device__ inline void begin() const {
        for (int step = 0; step < ahead(); ++step) weight(first_tile, step, step);
    }

    __device__ inline void go_on() const {
        Place place;
        int loaded = 0;  // stages of x
        for (int tile = first_tile; tile <= last_tile; tile += stride) {
            for (int step = 0; step < num_steps; ++step, ++loaded, place.next()) {
                if (loaded >= STAGES) wait_for(empty + 8 * place.stage, place.parity ^ 1);
                if (loaded >= ahead()) weight(tile, step, place.stage);
                load_x(stages + place.stage * STAGE_BYTES + TILES * TILE_BYTES + neighbour * X_BYTES / SHARING, x_map,
                       (first_step + step) * INPUTS, neighbour * ROWS / SHARING, full + 8 * place.stage, programs);
            }
        }
    }
};

KERNEL skinny_product(MAP_PARAMETER weight_map, MAP_PARAMETER x_map, unsigned short* out, int num_rows, int num_columns,
                      int num_steps) {
    const u32 stages = shared_memory(), full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int neighbour = blockIdx.x % SHARING, part = blockIdx.x / SHARING % PARTS;
    const int num_tiles = (num_columns + COLUMNS - 1) / COLUMNS;
    const int first = blockIdx.x / CLUSTER * SHARING + neighbour, stride = gridDim.x / PARTS;
    const int last = num_tiles - 1 + neighbour;  // who shares goes on as long as its neighbour, past the end of columns
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, TILES * 4 * SHARING);
        }
    }
    barriers_are_made();
#if SHARING > 1
    arrive_at_cluster();
#endif
    let_next_kernel_start();

    if (warp == TILES * 4) {
        const Loading loading{stages, full,  empty,  &weight_map,        &x_map,    first,
                              last,   stride, part * num_steps, num_steps, neighbour, ((1 << SHARING) - 1) << part * SHARING};
        if (lane == 0) {
            loading.begin();
            kernels_before_are_done();
        }
        warp_meets();
#if SHARING > 1
        wait_for_cluster();  // its programs have made their barriers
#endif
        if (lane == 0) loading.go_on();
        warp_meets();
#if PARTS > 1
        meet();
        meet();
#endif
#if SHARING > 1
        meet();
#endif
        return;
    }

#if SHARING > 1
    wait_for_cluster();
#endif
    const int group = warp / 4, part_of_group = warp % 4;
    Place place;
    for (int tile = first; tile <= last; tile += stride) {
        float d[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) d[i] = 0.0f;
        for (int step = 0; step < num_steps; ++step, place.next()) {
            wait_for(full + 8 * place.stage, place.parity);
            const u32 at = stages + place.stage * STAGE_BYTES;
            products_begin();
#pragma unroll
            for (int k = 0; k < INPUTS / 16; ++k) multiply(d, at + group * TILE_BYTES + 32 * k, at + TILES * TILE_BYTES + 32 * k);
            products_end();
#if SHARING > 1
            if (lane < SHARING) arrive_far(in_program(empty + 8 * place.stage, part * SHARING + lane));
#else
            if (lane == 0) arrive(empty + 8 * place.stage);
#endif
        }
#if PARTS > 1
        add_up(d, part, stages);
#endif
        // Of every eight rows of x a thread has two, and of its warp's 16 weight rows two, eight apart.
        const int up = lane / 4, pair = lane % 4 * 2;
        const int column = tile * COLUMNS + (GATED ? group * 32 + part_of_group * 8 : group * 64 + part_of_group * 16) + up;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            if (part_of(i / WIDE) != part) continue;
            const int row = i / 4 * 8 + pair + i % 2, at = column + (i % 4 >= 2 && !GATED ? 8 : 0);
            if ((GATED && i % 4 >= 2) || row >= num_rows || at >= num_columns) continue;
            out[(u64)row * num_columns + at] = rounded(GATED ? gated(d[i], d[i + 2]) : d[i]);
        }
    }
#if SHARING > 1
    meet();  // a neighbour may still say that it has multiplied
#endif
}
