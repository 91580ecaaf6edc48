// Attention of a captured step over paged keys and values, bfloat16: W queries of every request, G heads of queries for
// one head of keys, so that W x G rows meet each key once.
//
// One thread asks the copy engine for tiles of 64 keys and their values, as many ahead as shared memory holds, and
// begins before the kernel in front is done: what earlier steps wrote is there. Only then it waits for that kernel, which
// wrote this step's keys, values and queries, and asks for the tiles that hold some of them. A warp group attends: the
// tensor cores mix the values of a tile while the scores of the next one become shares.
//
// SHARED_BY programs, a cluster, take every other tile of a unit each, and in the end half of the columns of its result
// each, through each other's shared memory: through the cache it would take several times as long.
//
// Compiled for one shape (macros below). A stage of shared memory: a tile's keys, then its values, 64 elements of each
// head side by side (128 bytes, swizzled as the copy engine does), so that a head of 128 takes two blocks of 64 x 64.
//
//   HEAD_DIM  64 or 128
//   PAGE      tokens of a page: divides 64, or 64 divides it
//   WIDTH     queries of a request
//   GROUP     heads of queries for one of keys
//   ROWS      rows that one program's results have room for in `partial`, at most 64
//   CAUSAL    whether a query sees no token behind its own
//   STAGES    tiles on their way or in use
//   AHEAD     of them on their way, at most: more would make the kernel in front wait for its memory
//   SHARED_BY 1 or 2
//
// `units` and `pages` are read before the kernel in front is done: whoever writes them lets no kernel start before it is
// done, and a kernel that was not launched early, or that has waited for it, comes next.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct alignas(32) Unit {
    int request, begin, end, length, parts, first, unused[2];
};

constexpr int TILE = 64;  // keys
constexpr int HALVES = HEAD_DIM / 64;
constexpr u32 BLOCK_BYTES = TILE * 128;  // of 64 keys, 64 elements of each
constexpr u32 STAGE_BYTES = 2 * HALVES * BLOCK_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int BARRIERS = 2 * STAGES;
constexpr int BOX = PAGE < TILE ? PAGE : TILE;  // tokens of one copy
constexpr int ATTENDING = 128;  // threads
constexpr int MIXED = HALVES * 32;  // elements of a result that a thread has, of two rows
constexpr int KEPT = MIXED / SHARED_BY;  // of them in the end
constexpr u32 GIVEN_BYTES = SHARED_BY > 1 ? (KEPT + 4) * ATTENDING * 4 : 0;  // to each other

#ifdef EMULATED
#include "emulated.h"
#else
#if SHARED_BY > 1
#define KERNEL extern "C" __global__ void __launch_bounds__(ATTENDING + 32, 1) __cluster_dims__(SHARED_BY, 1, 1)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(ATTENDING + 32, 1)
#endif
#define MAP_PARAMETER const __grid_constant__ TensorMap
#define NOTHING __int_as_float(0xFF800000)  // 2 to this is nothing

#include "hopper.h"

// 64 elements of BOX tokens: of keys (plane 0) or values (1).
__device__ inline void load(u32 to, const TensorMap* map, int element, int token, int head, int plane, int page,
                            u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(map), "r"(element), "r"(token), "r"(head), "r"(plane),
        "r"(page), "r"(barrier)
        : "memory");
}

__device__ inline void will_be_read(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

__device__ inline void attending_threads_meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ inline float from_lane(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }

__device__ inline int of_lane(int value, int lane) { return __shfl_sync(0xFFFFFFFF, value, lane); }

__device__ inline int number_at(const int* at) { return __ldcg(at); }  // whatever an earlier step left beside it

__device__ inline u32 pair_at(const bf16* at) { return __ldcg((const u32*)at); }  // the kernel in front wrote it

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float binary_logarithm(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline void zero_row(u32 at) {
#pragma unroll
    for (int piece = 0; piece < 8; ++piece)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + 16 * piece), "r"(0) : "memory");
}

__device__ inline void tensor_cores_see_what_was_stored() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline int arrived_before(int* count) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

__device__ inline void tell(u32 at, int value) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }
__device__ inline int told(u32 at) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

__device__ inline float from_another(const float* at) { return __ldcg(at); }
__device__ inline float2 pair_from_another(const float* at) { return __ldcg((const float2*)at); }

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F32(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12), F4(i + 16), F4(i + 20), F4(i + 24), F4(i + 28)
#define PRODUCT(transposed)                                                                          \
    asm volatile(                                                                                    \
        "{\n"                                                                                        \
        ".reg .pred more;\n"                                                                         \
        "setp.ne.b32 more, %37, 0;\n"                                                                \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "                                      \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "          \
        "{%32, %33, %34, %35}, %36, more, 1, 1, " transposed ";\n"                                   \
        "}\n"                                                                                        \
        : F32(0)                                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described(block)), "r"(more))

// d [64, 64] (+)= a [64, 16] times the transpose of 64 rows of 16 elements, whose first lies at `block`
__device__ inline void multiply_by_keys(float (&d)[32], const u32 (&a)[4], u32 block, int more) { PRODUCT("0"); }
// d [64, 64] += a [64, 16] times 16 rows of 64 elements, whose first lies at `block`
__device__ inline void multiply_by_values(float* d_at, const u32 (&a)[4], u32 block) {
    float(&d)[32] = *reinterpret_cast<float(*)[32]>(d_at);
    const int more = 1;
    PRODUCT("1");
}
#endif

__device__ inline Unit unit_at(const Unit* unit) {
    const int* field = &unit->request;
    return {number_at(field), number_at(field + 1), number_at(field + 2), number_at(field + 3), number_at(field + 4),
            number_at(field + 5), {0, 0}};
}

struct Place {
    int stage = 0;
    u32 parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A program's own tiles of a unit: every SHARED_BY-th.
struct Tiles {
    int begin, end, first;
    __device__ inline int at(int tile) const { return begin + (tile * SHARED_BY + first) * TILE; }
    __device__ inline int count() const { return max((end - begin + TILE - 1) / TILE + SHARED_BY - 1 - first, 0) / SHARED_BY; }
};

// One warp's; its first thread asks for copies, all of them read page numbers, 32 at a time.
__device__ inline void keep_loading(u32 stages, u32 full, u32 empty, const TensorMap* map, const int* pages, Tiles tiles,
                                    int length, int head, int lane) {
    constexpr int BOXES = TILE / BOX;
    const int num_tiles = tiles.count(), last_page = (length - 1) / PAGE;
    int read_ahead = 0;
    bool waited = false;
    Place place, arriving;
    if (lane == 0) will_be_read(map);
    for (int tile = 0; tile < num_tiles; ++tile, place.next()) {
        if (tile * BOXES % 32 == 0) {
            const int number = tile * BOXES + lane;
            read_ahead = number_at(pages + min((tiles.at(number / BOXES) + number % BOXES * BOX) / PAGE, last_page));
        }
        if (!waited && tiles.at(tile) + TILE > length - WIDTH) kernels_before_are_done(), waited = true;
        if (tile >= AHEAD) wait_for(full + 8 * arriving.stage, arriving.parity), arriving.next();
        if (tile >= STAGES) wait_for(empty + 8 * place.stage, place.parity ^ 1);
        const u32 to = stages + place.stage * STAGE_BYTES, barrier = full + 8 * place.stage;
        if (lane == 0) expect_bytes(barrier, STAGE_BYTES);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const int page = of_lane(read_ahead, (tile * BOXES + box) % 32);
            const int token = (tiles.at(tile) + box * BOX) % PAGE;
            if (lane > 0) continue;
#pragma unroll
            for (int plane = 0; plane < 2; ++plane)
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    load(to + (plane * HALVES + half) * BLOCK_BYTES + box * BOX * 128, map, half * 64, token, head, plane,
                         page, barrier);
        }
    }
}

// The state of a thread's two rows, eight apart, on their way through the keys.
struct Rows {
    float best[2] = {NOTHING, NOTHING}, total[2] = {0.0f, 0.0f};
    float mixed[MIXED];

    float shrink[2] = {1.0f, 1.0f};  // what `mixed` has yet to be multiplied by

    // What it had so far counts 2 ** (best - base) of what comes.
    __device__ inline float raise(int row, float higher) {
        const float base = higher == NOTHING ? 0.0f : higher;
        shrink[row] = power_of_two(best[row] - base);
        best[row] = higher;
        total[row] *= shrink[row];
        return base;
    }

    __device__ inline void follow(int row) {
#pragma unroll
        for (int i = 0; i < MIXED; ++i)
            if (i % 4 / 2 == row) mixed[i] *= shrink[row];
    }
};

__device__ inline float over_quad_max(float x) {
    x = fmaxf(x, from_lane(x, 1));
    return fmaxf(x, from_lane(x, 2));
}

__device__ inline float over_quad_sum(float x) {
    x += from_lane(x, 1);
    return x + from_lane(x, 2);
}

#if SHARED_BY > 1
// Leave in the first KEPT of `mixed` this program's columns of what the cluster has, the first half or the second.
__device__ inline void join(Rows& rows, int rank, u32 room) {
    constexpr u32 apart = ATTENDING * 4;
    const u32 mine = room + threadIdx.x * 4;
    wait_for_cluster();  // the other is there
    const u32 there = in_program(mine, 1 - rank);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) store_far(there + i * apart, rank ? rows.mixed[i] : rows.mixed[KEPT + i]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        store_far(there + (KEPT + row) * apart, rows.best[row]);
        store_far(there + (KEPT + 2 + row) * apart, rows.total[row]);
    }
    arrive_at_cluster();
    wait_for_cluster();
    if (rank)
#pragma unroll
        for (int i = 0; i < KEPT; ++i) rows.mixed[i] = rows.mixed[KEPT + i];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float best = loaded_near(mine + (KEPT + row) * apart);
        const float base = rows.raise(row, fmaxf(rows.best[row], best)), share = power_of_two(best - base);
        rows.follow(row);
        // Both programs come to the same, to the bit: whose weight of a part the joining program finds must not matter.
        rows.total[row] = __fadd_rn(rows.total[row], __fmul_rn(share, loaded_near(mine + (KEPT + 2 + row) * apart)));
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (i % 4 / 2 == row) rows.mixed[i] += share * loaded_near(mine + i * apart);
    }
}
#endif

KERNEL attend(MAP_PARAMETER map, const bf16* queries, bf16* out, float* partial, float* weights, int* arrived,
              const int* pages, const Unit* units, int query_stride, int table_stride, float scale) {
    const u32 stages = shared_memory(), full = stages + RING_BYTES + GIVEN_BYTES, empty = full + 8 * STAGES;
    const int rank = blockIdx.x % SHARED_BY, head = blockIdx.x / SHARED_BY, num_heads = gridDim.x / SHARED_BY;
    const int block = blockIdx.z, num_blocks = gridDim.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Unit unit = unit_at(units + blockIdx.y);
    if (unit.request < 0) return;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, ATTENDING / 32);
        }
    }
    barriers_are_made();
#if SHARED_BY > 1
    arrive_at_cluster();
#endif
    const Tiles tiles{unit.begin, unit.end, rank};

    if (warp == ATTENDING / 32) {
        keep_loading(stages, full, empty, &map, pages + unit.request * (long long)table_stride, tiles, unit.length, head, lane);
#if SHARED_BY > 1
        wait_for_cluster();
        arrive_at_cluster();
        wait_for_cluster();
#endif
        return;
    }

    kernels_before_are_done();
    let_next_kernel_start();
    const int seen_by_all = unit.length - WIDTH;  // positions below it
    int asking[2], limit[2];  // of this thread's rows: which row, behind which position it sees nothing
    const bf16* query[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int number = block * 64 + warp * 16 + lane / 4 + 8 * row, token = number / GROUP;
        asking[row] = number < WIDTH * GROUP ? number : -1;
        limit[row] = CAUSAL ? seen_by_all + token + 1 : unit.length;
        query[row] = queries + (unit.request * WIDTH + token) * (long long)query_stride +
                     (head * GROUP + number % GROUP) * HEAD_DIM + lane % 4 * 2;
    }
    u32 q[HEAD_DIM / 16][4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) q[k][i] = asking[i % 2] < 0 ? 0 : pair_at(query[i % 2] + k * 16 + i / 2 * 8);

    Rows rows;
#pragma unroll
    for (int i = 0; i < MIXED; ++i) rows.mixed[i] = 0.0f;
    const int num_tiles = tiles.count();
    float scores[32];
    u32 shares[TILE / 16][4], next_shares[TILE / 16][4];  // of a tile that is being mixed, and of the one behind it
    const auto score = [&](u32 keys) {
        read(q);
        products_begin();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) multiply_by_keys(scores, q[k], keys + k / 4 * BLOCK_BYTES + k % 4 * 32, k > 0);
        products_are_asked_for();
    };
    const auto mix = [&](u32 values) {
        read(shares);
        products_begin();
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k)
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                multiply_by_values(rows.mixed + 32 * half, shares[k], values + half * BLOCK_BYTES + k * 16 * 128);
        products_are_asked_for();
    };
    // From the scores of the tile at a position what each of its tokens counts, into next_shares.
    const auto share = [&](int at, u32 values) {
        if (at + TILE > seen_by_all) {
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (at + i / 4 * 8 + lane % 4 * 2 + i % 2 >= limit[i % 4 / 2]) scores[i] = NOTHING;
            if (at + TILE > unit.length) {  // what lies there may be no number, and not even nothing of it counts
                for (int row = unit.length - at + threadIdx.x; row < TILE; row += ATTENDING)
                    for (int half = 0; half < HALVES; ++half) zero_row(values + half * BLOCK_BYTES + row * 128);
                tensor_cores_see_what_was_stored();
                attending_threads_meet();
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float higher = NOTHING;
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i % 4 / 2 == row) higher = fmaxf(higher, scores[i]);
            const float base = rows.raise(row, fmaxf(rows.best[row], over_quad_max(higher) * scale));
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i % 4 / 2 == row) {
                    scores[i] = power_of_two(scores[i] * scale - base);
                    rows.total[row] += scores[i];
                }
        }
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) next_shares[i / 4][i % 4] = rounded(scores[2 * i], scores[2 * i + 1]);
    };
    const auto go_on = [&] {
        rows.follow(0);
        rows.follow(1);
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) shares[i / 4][i % 4] = next_shares[i / 4][i % 4];
    };
    const auto values_of = [&](Place place) { return stages + place.stage * STAGE_BYTES + HALVES * BLOCK_BYTES; };

    if (num_tiles > 0) {
        Place place, behind;
        wait_for(full, 0);
        score(stages);
        wait_for_products();
        written(scores);
        share(tiles.at(0), values_of(place));
        go_on();
        behind.next();
        for (int tile = 1; tile < num_tiles; ++tile, place.next(), behind.next()) {
            wait_for(full + 8 * behind.stage, behind.parity);
            score(stages + behind.stage * STAGE_BYTES);
            mix(values_of(place));
            wait_for_products_before();
            written(scores);
            share(tiles.at(tile), values_of(behind));
            wait_for_products();
            written(rows.mixed);
            read(shares);
            if (lane == 0) arrive(empty + 8 * place.stage);
            go_on();
        }
        mix(values_of(place));
        wait_for_products();
        written(rows.mixed);
    }

#pragma unroll
    for (int row = 0; row < 2; ++row) rows.total[row] = over_quad_sum(rows.total[row]);
#if SHARED_BY > 1
    join(rows, rank, stages + RING_BYTES);
#endif
    const bool whole = unit.parts == 1;
    long long row_at[2];  // in `partial`, of this part
    const long long part_stride = (long long)num_heads * num_blocks * ROWS;
    const int first_column = rank * (HEAD_DIM / SHARED_BY) + lane % 4 * 2;  // of this thread's
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float share = rows.total[row] == 0.0f ? 1.0f : 1.0f / rows.total[row];
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (i % 4 / 2 == row) rows.mixed[i] *= share;
        row_at[row] = ((long long)blockIdx.y * num_heads + head) * num_blocks * ROWS + asking[row] - block * (64 - ROWS);
    }
    if (!whole) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if (asking[row] < 0) continue;
            if (lane % 4 == 0) weights[row_at[row]] = rows.best[row] + binary_logarithm(rows.total[row]);
#pragma unroll
            for (int i = 2 * row; i < KEPT; i += 4)
                *(float2*)(partial + row_at[row] * HEAD_DIM + first_column + i / 4 * 8) =
                    make_float2(rows.mixed[i], rows.mixed[i + 1]);
        }
        attending_threads_meet();
        int* count = arrived + ((unit.request * num_heads + head) * num_blocks + block) * SHARED_BY + rank;
        if (threadIdx.x == 0) {
            const int before = arrived_before(count);
            if (before == unit.parts - 1) *count = 0;  // for the next layer
            tell(stages, before);
        }
        attending_threads_meet();
        if (told(stages) != unit.parts - 1) return;
        const int own = blockIdx.y - unit.first;
        Rows joined;
#pragma unroll
        for (int i = 0; i < MIXED; ++i) joined.mixed[i] = 0.0f;
        for (int part = 0; part < unit.parts; ++part) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                if (asking[row] < 0) continue;
                const long long there = row_at[row] + (part - own) * part_stride;
                const float weight = from_another(weights + there);
                const float base = joined.raise(row, fmaxf(joined.best[row], weight));
                joined.follow(row);
                const float share = power_of_two(weight - base);
                joined.total[row] += share;
#pragma unroll
                for (int i = 2 * row; i < KEPT; i += 4) {
                    float2 found = make_float2(rows.mixed[i], rows.mixed[i + 1]);
                    if (part != own) found = pair_from_another(partial + there * HEAD_DIM + first_column + i / 4 * 8);
                    joined.mixed[i] += share * found.x;
                    joined.mixed[i + 1] += share * found.y;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const float total = joined.total[i % 4 / 2];
            rows.mixed[i] = joined.mixed[i] / (total == 0.0f ? 1.0f : total);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        if (asking[row] < 0) continue;
        const int token = unit.request * WIDTH + asking[row] / GROUP, of_group = asking[row] % GROUP;
        bf16* to = out + ((long long)token * num_heads * GROUP + head * GROUP + of_group) * HEAD_DIM + first_column;
#pragma unroll
        for (int i = 2 * row; i < KEPT; i += 4) *(u32*)(to + i / 4 * 8) = rounded(rows.mixed[i], rows.mixed[i + 1]);
    }
}
