// What the kernels here ask of a GPU, done by a CPU: a thread for each of theirs, a cluster's programs together, one
// cluster after the other. Swizzles, fragments and barriers are the device's; time is not.
//
// What a device would let pass or hang at ends the process with a word: a barrier reached too often, words to a program
// that has ended, and reads of what the kernel in front may still have to write.
// Not played: how long anything takes, and fences other than that behind stores for the tensor cores.

#include <atomic>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

using std::max;
using std::min;

#define __device__
#define KERNEL static void
#define MAP_PARAMETER const TensorMap
#define __expf expf
#define __fdividef(a, b) ((a) / (b))
#define __fadd_rn(a, b) ((a) + (b))
#define __fmul_rn(a, b) ((a) * (b))
#define NOTHING (-INFINITY)

#ifdef HEAD_DIM
constexpr int CLUSTER_PROGRAMS = SHARED_BY, MULTIPLYING = ATTENDING, ALL = ATTENDING + 32;
constexpr int MEMORY_BYTES = RING_BYTES + GIVEN_BYTES;
#else
constexpr int CLUSTER_PROGRAMS = PARTS, MULTIPLYING = THREADS, ALL = THREADS + 64;
constexpr int MEMORY_BYTES = RING_BYTES + SUM_BYTES;
#endif

struct Dim {
    int x, y, z;
};
struct float2 {
    float x, y;
};

static thread_local Dim threadIdx, blockIdx;
static thread_local bool waited;  // for the kernel in front
static Dim gridDim;

[[noreturn]] static void refuse(const char* why) {
    fprintf(stderr, "%s\n", why);
    _Exit(3);
}

// A tensor as the copy engine is told of it, innermost dimension first; sizes in elements. `fresh` [page, token]: what
// the kernel in front writes.
struct Map {
    const unsigned short* base;
    long long sizes[5], strides[5];
    int box[5];
    const unsigned char* fresh;
};

struct Barrier {
    u32 arrivals = 0, pending = 0, phase = 0;
    int bytes = 0;
};

struct Program {
    std::vector<unsigned char> memory = std::vector<unsigned char>(MEMORY_BYTES, 0xFF);
    std::vector<Barrier> barriers = std::vector<Barrier>(BARRIERS);
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::barrier<> all{ALL}, multiplying{MULTIPLYING};
    std::atomic<int> running{ALL};
    float lanes[ALL / 32][32];
    float a[64][16];

    Program() {
        for (int warp = 0; warp < ALL / 32; ++warp) warps.push_back(std::make_unique<std::barrier<>>(32));
    }
};

static std::vector<std::unique_ptr<Program>> programs_of_cluster;
static std::barrier<>* cluster;
static std::mutex lock;
static std::condition_variable changed;

static int rank() { return blockIdx.x % CLUSTER_PROGRAMS; }
static Program& here() { return *programs_of_cluster[rank()]; }

// An address of this program's shared memory, or, with a number in its highest byte, of another's.
static Program& owner(u32 at) {
    Program& found = at >> 24 ? *programs_of_cluster[(at >> 24) - 1] : here();
    if (!found.running) refuse("a program that has ended is spoken to");
    return found;
}

static Barrier& barrier_at(u32 at) { return owner(at).barriers[((at & 0xFFFFFF) - MEMORY_BYTES) / 8]; }

static void settle(Barrier& barrier) {
    if (barrier.arrivals == 0 || barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.arrivals;
    changed.notify_all();
}

static u32 shared_memory() { return 0; }
static void init_barrier(u32 at, u32 arrivals) { barrier_at(at) = {arrivals, arrivals, 0, 0}; }
static void barriers_are_made() { here().all.arrive_and_wait(); }

static void arrive_with(u32 at, int bytes) {
    std::lock_guard guard(lock);
    Barrier& barrier = barrier_at(at);
    if (!barrier.pending) refuse("a barrier has more arrivals than it waits for");
    barrier.bytes += bytes;
    --barrier.pending;
    settle(barrier);
}

static void expect_bytes(u32 at, u32 bytes) { arrive_with(at, bytes); }
static void arrive(u32 at) { arrive_with(at, 0); }

static void wait_for(u32 at, u32 parity) {
    std::unique_lock guard(lock);
    Barrier& barrier = barrier_at(at);
    changed.wait(guard, [&] { return barrier.phase != parity; });
}

static u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

static void copy_box(Program& program, u32 to, const TensorMap* told, const int* from, u32 at) {
    const Map& map = *(const Map*)told->opaque[0];
    int row = 0;
    for (int e = 0; e < map.box[4]; ++e)
        for (int d = 0; d < map.box[3]; ++d)
            for (int c = 0; c < map.box[2]; ++c)
                for (int b = 0; b < map.box[1]; ++b, ++row) {
                    const long long place[5] = {from[0], from[1] + b, from[2] + c, from[3] + d, from[4] + e};
                    bool inside = true;
                    long long offset = 0;
                    for (int i = 0; i < 5; ++i) {
                        inside &= place[i] < map.sizes[i];
                        offset += place[i] * map.strides[i];
                    }
                    if (map.fresh && !waited && map.fresh[place[4] * map.sizes[1] + place[1]])
                        refuse("read before the kernel in front has written it");
                    for (int i = 0; i < map.box[0]; ++i) {
                        const unsigned short value = inside ? map.base[offset + i] : 0;
                        memcpy(&program.memory[swizzled(to + row * 128 + 2 * i)], &value, 2);
                    }
                }
    std::lock_guard guard(lock);
    if (!program.running) refuse("a program that has ended is copied to");
    Barrier& barrier = program.barriers[(at - MEMORY_BYTES) / 8];
    barrier.bytes -= 128 * row;
    settle(barrier);
}

static void kernels_before_are_done() { waited = true; }
static void let_next_kernel_start() {}
static void warp_meets() { here().warps[threadIdx.x / 32]->arrive_and_wait(); }

static thread_local std::unique_ptr<std::barrier<>::arrival_token> arrived_at_cluster;

static void arrive_at_cluster() {
    if (arrived_at_cluster) refuse("a thread arrives twice before it waits");
    arrived_at_cluster = std::make_unique<std::barrier<>::arrival_token>(cluster->arrive());
}

static void wait_for_cluster() {
    if (!arrived_at_cluster) refuse("a thread waits for a cluster at which it has not arrived");
    cluster->wait(std::move(*arrived_at_cluster));
    arrived_at_cluster.reset();
}

static u32 in_program(u32 at, int program) { return at | (u32)(program + 1) << 24; }

static float loaded_near(u32 at) {
    float value;
    memcpy(&value, &here().memory[at], 4);
    return value;
}

template <int N>
static void store_some_far(u32 at, const float* f) {
    if ((at & 0xFFFFFF) + 4 * N > owner(at).memory.size()) refuse("sums lie behind shared memory");
    memcpy(&owner(at).memory[at & 0xFFFFFF], f, 4 * N);
}

static void store_far(u32 at, float value) { store_some_far<1>(at, &value); }
static void store_four_far(u32 at, const float* f) { store_some_far<4>(at, f); }

static void products_begin() { warp_meets(); }
static void products_are_asked_for() {}
static void wait_for_products_before() { warp_meets(); }
static void wait_for_products() { warp_meets(); }
template <int N>
static void written(float (&)[N]) {}
template <int K>
static void read(u32 (&)[K][4]) {}

static float wide(unsigned short bits) {
    const u32 all = (u32)bits << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
}

static unsigned short narrow(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static u32 rounded(float low, float high) { return (u32)narrow(high) << 16 | narrow(low); }

static float element(u32 at) {
    unsigned short bits;
    memcpy(&bits, &here().memory[swizzled(at)], 2);
    return wide(bits);
}

#ifdef HEAD_DIM

static float2 make_float2(float x, float y) { return {x, y}; }

static void load(u32 to, const TensorMap* map, int element, int token, int head, int plane, int page, u32 at) {
    const int from[5] = {element, token, head, plane, page};
    copy_box(here(), to, map, from, at);
}

// What a thread stores is there for tensor cores once it has said so and all threads have met.
static thread_local std::vector<u32> stored_rows, told_rows;

static void zero_row(u32 at) { stored_rows.push_back(at); }

static void tensor_cores_see_what_was_stored() {
    told_rows.insert(told_rows.end(), stored_rows.begin(), stored_rows.end());
    stored_rows.clear();
}

static void attending_threads_meet() {
    for (u32 at : told_rows) memset(&here().memory[at], 0, 128);
    told_rows.clear();
    here().multiplying.arrive_and_wait();
}

static void will_be_read(const TensorMap*) {}

static float from_lane(float value, int mask) {
    auto& lanes = here().lanes[threadIdx.x / 32];
    lanes[threadIdx.x % 32] = value;
    warp_meets();
    const float found = lanes[threadIdx.x % 32 ^ mask];
    warp_meets();
    return found;
}

static int of_lane(int value, int lane) {
    auto& lanes = here().lanes[threadIdx.x / 32];
    memcpy(&lanes[threadIdx.x % 32], &value, 4);
    warp_meets();
    memcpy(&value, &lanes[lane], 4);
    warp_meets();
    return value;
}

static int number_at(const int* at) { return *at; }

static u32 pair_at(const bf16* at) {
    u32 pair;
    memcpy(&pair, at, 4);
    return pair;
}

static float power_of_two(float x) { return exp2f(x); }
static float binary_logarithm(float x) { return log2f(x); }
static int arrived_before(int* count) { return (*count)++; }
static void tell(u32 at, int value) { memcpy(&here().memory[at], &value, 4); }

static int told(u32 at) {
    int value;
    memcpy(&value, &here().memory[at], 4);
    return value;
}

static float from_another(const float* at) { return *at; }
static float2 pair_from_another(const float* at) { return {at[0], at[1]}; }


static void product(float* d, const u32 (&a)[4], u32 block, int more, bool by_values) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
            here().a[16 * warp + lane / 4 + i % 2 * 8][lane % 4 * 2 + e + i / 2 * 8] = wide(a[i] >> 16 * e & 0xFFFF);
    here().multiplying.arrive_and_wait();
    for (int i = 0; i < 32; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * (i % 4 / 2), n = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = more ? d[i] : 0.0f;
        for (int k = 0; k < 16; ++k)
            sum += here().a[row][k] * element(by_values ? block + k * 128 + n * 2 : block + n * 128 + k * 2);
        d[i] = sum;
    }
    here().multiplying.arrive_and_wait();
}

static void multiply_by_keys(float (&d)[32], const u32 (&a)[4], u32 block, int more) { product(d, a, block, more, false); }
static void multiply_by_values(float* d, const u32 (&a)[4], u32 block) { product(d, a, block, 1, true); }

#else

static void load_weight(u32 to, const TensorMap* map, int input, int tile, u32 at) {
    const int from[5] = {input, GATED ? 0 : tile * TILES * 64, 0, GATED ? tile * TILES * 4 : 0, 0};
    copy_box(here(), to, map, from, at);
}

static void load_x(u32 to, const TensorMap* map, int input, u32 at) {
    if (!waited) refuse("x is read before the kernel in front has written it");
    const int from[5] = {input, 0, 0, 0, 0};
    copy_box(here(), to, map, from, at);
}

static void multiply(float (&d)[SUMS], u32 tile, u32 x) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (int i = 0; i < SUMS; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * (i % 4 / 2), n = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) d[i] += element(tile + row * 128 + k * 2) * element(x + n * 128 + k * 2);
    }
}

static u32 transposed(u32 pair) {
    auto& lanes = here().lanes[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(&lanes[lane], &pair, 4);
    warp_meets();
    u32 found = 0;
    for (int e = 0; e < 2; ++e) {
        u32 from;
        memcpy(&from, &lanes[(lane % 4 * 2 + e) * 4 + lane / 8], 4);
        found |= (from >> lane / 4 % 2 * 16 & 0xFFFF) << 16 * e;
    }
    warp_meets();
    return found;
}

#endif

// Run `work` as every thread of a grid.
template <typename Work>
static void on_grid(Dim grid, Work work) {
    gridDim = grid;
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; x += CLUSTER_PROGRAMS) {
                programs_of_cluster.clear();
                for (int i = 0; i < CLUSTER_PROGRAMS; ++i) programs_of_cluster.push_back(std::make_unique<Program>());
                std::barrier<> together(CLUSTER_PROGRAMS * (ALL));
                cluster = &together;
                std::vector<std::thread> threads;
                for (int i = 0; i < CLUSTER_PROGRAMS; ++i)
                    for (int thread = 0; thread < ALL; ++thread)
                        threads.emplace_back([=] {
                            threadIdx = {thread, 0, 0};
                            blockIdx = {x + i, y, z};
                            waited = false;
                            work();
                            --programs_of_cluster[i]->running;
                        });
                for (auto& thread : threads) thread.join();
            }
}
