// out [rows, columns] = x [rows, inputs] times the transpose of weight [columns, inputs], bfloat16, of few rows.
//
// A step of few tokens reads every weight once and computes little: what counts is that weights keep coming. So one
// thread asks the copy engine for tiles of the weight, as many ahead as shared memory holds, and begins before the
// kernel in front is done: weights depend on nobody. Another waits for that kernel and asks for x, a few tiles ahead: it
// comes from the cache, and what it does not take of shared memory holds weights. Warp groups multiply what has come, 64
// weight rows each, with all rows of x beside them.
//
// Compiled for one shape of tiles (macros below). A stage of the weight is TILES tiles of 64 weight rows x 64 inputs, one
// of x its ROWS x 64, each row 128 bytes, swizzled as the copy engine does (128 bytes) and the tensor cores read.
//
//   ROWS      rows of x that a program multiplies, 16, 32, 64 or 128; those behind num_rows come as zeros
//   TILES     warp groups, each with a tile of 64 weight rows
//   STAGES    of the weight on their way or in use
//   AHEAD     of them on their way, at most
//   X_STAGES  of x
//   GATED     weight has 2 x columns rows, gates first; out is silu(gate) * up. Eight gates and their eight ups alternate
//             in a tile, so that a thread has both
//   PARTS     into how many parts the inputs are cut, a program each; they form a cluster and add up what they have, in
//             the order of the parts, through each other's shared memory

#if GATED && PARTS > 1
#error "the rows of a gate and its up may end in two parts"
#endif
#if ROWS / 2 % (4 * PARTS)
#error "four sums move at once"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int INPUTS = 64;  // of a stage
constexpr u32 TILE_BYTES = 64 * INPUTS * 2;
constexpr u32 WEIGHT_BYTES = TILES * TILE_BYTES, X_BYTES = ROWS * INPUTS * 2;  // of a stage
constexpr u32 RING_BYTES = STAGES * WEIGHT_BYTES + X_STAGES * X_BYTES;  // sums of other parts follow, then barriers
constexpr int BARRIERS = 2 * (STAGES + X_STAGES);
constexpr int SUMS = ROWS / 2;  // of a thread: 64 x ROWS of a warp group
constexpr int SHARE = SUMS / PARTS, PIECES = SHARE / 4;  // of them that a thread of each part adds up; four move at once
constexpr int THREADS = TILES * 128;  // that multiply; two warps more ask for copies
constexpr u32 SUM_BYTES = (PARTS - 1) * SHARE * THREADS * 4;
constexpr int COLUMNS = (GATED ? 32 : 64) * TILES;  // of a program
constexpr u64 ONCE = 0x12F0000000000000;  // cache policies: evict first,
constexpr u64 OFTEN = 0x14F0000000000000;  // and last

#ifdef EMULATED
#include "emulated.h"
#else
#if PARTS > 1
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS + 64, 1) __cluster_dims__(PARTS, 1, 1)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
#endif
#define MAP_PARAMETER const __grid_constant__ TensorMap

#include "hopper.h"

__device__ inline void load_weight(u32 to, const TensorMap* map, int input, int tile, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(input),
        "r"(GATED ? 0 : tile * TILES * 64), "r"(0), "r"(GATED ? tile * TILES * 4 : 0), "r"(barrier), "l"(ONCE)
        : "memory");
}

__device__ inline void load_x(u32 to, const TensorMap* map, int input, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(input), "r"(0), "r"(barrier), "l"(OFTEN)
        : "memory");
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

// Of a warp's 8 x 8 elements, two neighbours of a row in each thread, the same of the transpose.
__device__ inline u32 transposed(u32 pair) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
    return found;
}

#endif  // EMULATED

__device__ inline float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Stages that are filled and used in turn. Barriers: one of each stage that says it is full, then those that say empty.
template <int LENGTH, u32 BYTES>
struct Ring {
    u32 memory, barriers;
    int stage = 0;
    u32 parity = 0;

    __device__ Ring(u32 memory, u32 barriers) : memory(memory), barriers(barriers) {}
    __device__ u32 place() const { return memory + stage * BYTES; }
    __device__ u32 full() const { return barriers + 8 * stage; }
    __device__ u32 empty() const { return barriers + 8 * (LENGTH + stage); }
    __device__ void next() {
        if (++stage == LENGTH) stage = 0, parity ^= 1;
    }
    // Who fills it: wait until there is room, and say what comes.
    __device__ void make_room() const {
        wait_for(empty(), parity ^ 1);
        expect_bytes(full(), BYTES);
    }
    __device__ void wait_until_full() const { wait_for(full(), parity); }
    __device__ void init(int users) const {
        for (int i = 0; i < LENGTH; ++i) {
            init_barrier(barriers + 8 * i, 1);
            init_barrier(barriers + 8 * (LENGTH + i), users);
        }
    }
};

#if PARTS > 1
// Leave in d[part * SHARE ...] the sums over all parts, `part` being this program's own. `room`: shared memory for
// SHARE floats of every thread of every other part. Programs have arrived at their cluster when they began.
__device__ inline void add_up(float (&d)[SUMS], int part, u32 room) {
    constexpr u32 apart = THREADS * 16;  // pieces of one thread
    const u32 mine = room + threadIdx.x * 16;
    wait_for_cluster();  // all are there
#pragma unroll
    for (int to = 0; to < PARTS; ++to) {
        if (to == part) continue;
        const u32 there = in_program(mine, to) + (part - (part > to)) * PIECES * apart;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) store_four_far(there + piece * apart, d + to * SHARE + piece * 4);
    }
    arrive_at_cluster();
    wait_for_cluster();
#pragma unroll
    for (int own = 0; own < PARTS; ++own) {
        if (own != part) continue;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const u32 at = mine + i / 4 * apart + i % 4 * 4;
            float total = 0.0f;
#pragma unroll
            for (int from = 0; from < PARTS; ++from)
                total += from == own ? d[own * SHARE + i] : loaded_near(at + (from - (from > own)) * PIECES * apart);
            d[own * SHARE + i] = total;
        }
    }
}
#endif

KERNEL skinny_product(MAP_PARAMETER weight_map, MAP_PARAMETER x_map, unsigned short* out, int num_rows, int num_columns,
                      int num_steps) {
    const u32 memory = shared_memory(), barriers = memory + RING_BYTES + SUM_BYTES;
    Ring<STAGES, WEIGHT_BYTES> weights(memory, barriers);
    Ring<X_STAGES, X_BYTES> xs(memory + STAGES * WEIGHT_BYTES, barriers + 16 * STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_tiles = (num_columns + COLUMNS - 1) / COLUMNS, part = blockIdx.x % PARTS;
    const int first = blockIdx.x / PARTS, stride = gridDim.x / PARTS, first_input = part * num_steps * INPUTS;
    if (threadIdx.x == 0) {
        weights.init(TILES * 4);
        xs.init(TILES * 4);
    }
    barriers_are_made();
#if PARTS > 1
    arrive_at_cluster();
#endif
    let_next_kernel_start();

    if (warp >= TILES * 4) {
        if (lane == 0 && warp == TILES * 4) {
            Ring<STAGES, WEIGHT_BYTES> arriving = weights;
            int asked = 0;
            for (int tile = first; tile < num_tiles; tile += stride)
                for (int step = 0; step < num_steps; ++step, ++asked, weights.next()) {
                    if (asked >= AHEAD) arriving.wait_until_full(), arriving.next();
                    weights.make_room();
                    load_weight(weights.place(), &weight_map, first_input + step * INPUTS, tile, weights.full());
                }
        } else if (lane == 0) {
            kernels_before_are_done();
            for (int tile = first; tile < num_tiles; tile += stride)
                for (int step = 0; step < num_steps; ++step, xs.next()) {
                    xs.make_room();
                    load_x(xs.place(), &x_map, first_input + step * INPUTS, xs.full());
                }
        }
#if PARTS > 1
        warp_meets();
        wait_for_cluster();
        arrive_at_cluster();
        wait_for_cluster();
#endif
        return;
    }

    const int group = warp / 4, part_of_group = warp % 4;
    for (int tile = first; tile < num_tiles; tile += stride) {
        float d[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) d[i] = 0.0f;
        u32 weight_in_use = 0, x_in_use = 0;  // the barriers of the stage before
        for (int step = 0; step < num_steps; ++step, weights.next(), xs.next()) {
            weights.wait_until_full();
            xs.wait_until_full();
            const u32 weight = weights.place() + group * TILE_BYTES, x = xs.place();
            products_begin();
#pragma unroll
            for (int k = 0; k < INPUTS / 16; ++k) multiply(d, weight + 32 * k, x + 32 * k);
            products_are_asked_for();
            if (step > 0) {
                wait_for_products_before();
                if (lane == 0) arrive(weight_in_use), arrive(x_in_use);
            }
            weight_in_use = weights.empty(), x_in_use = xs.empty();
        }
        wait_for_products();
        written(d);
        if (lane == 0) arrive(weight_in_use), arrive(x_in_use);
#if PARTS > 1
        add_up(d, part, memory + RING_BYTES);
#endif
        // A warp has 16 weight rows, or eight behind a gate, in blocks of eight with eight rows of x each.
        const int column = tile * COLUMNS + (GATED ? group * 32 + part_of_group * 8 : group * 64 + part_of_group * 16) + lane % 4 * 2;
        unsigned short* to = out + (long long)(lane / 4) * num_columns + column;
#pragma unroll
        for (int i = 0; i < SUMS; i += GATED ? 4 : 2) {
            if (i / SHARE != part) continue;
            const int row = i / 4 * 8, right = i % 4 / 2 * 8;  // from `to`
            const u32 pair = transposed(GATED ? rounded(gated(d[i], d[i + 2]), gated(d[i + 1], d[i + 3])) : rounded(d[i], d[i + 1]));
            if (row + lane / 4 < num_rows && column + right < num_columns)
                *(u32*)(to + (long long)row * num_columns + right) = pair;
        }
    }
}
