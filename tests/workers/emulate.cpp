// Entrances for ctypes; KERNEL_FILE is one of the kernels here.
#define EMULATED
#include KERNEL_FILE

#ifdef HEAD_DIM
extern "C" void run(const Map* told, const bf16* queries, bf16* out, float* partial, float* weights, int* arrived,
                    const int* pages, const int* units, int query_stride, int table_stride, float scale, int heads,
                    int num_units, int blocks) {
    TensorMap map;
    map.opaque[0] = (u64)told;
    on_grid({heads * SHARED_BY, num_units, blocks}, [=] {
        attend(map, queries, out, partial, weights, arrived, pages, (const Unit*)units, query_stride, table_stride, scale);
    });
}
#else
extern "C" void run(const Map* weight, const Map* x, unsigned short* out, int rows, int columns, int steps, int programs) {
    TensorMap weight_map, x_map;
    weight_map.opaque[0] = (u64)weight;
    x_map.opaque[0] = (u64)x;
    on_grid({programs, 1, 1}, [=] { skinny_product(weight_map, x_map, out, rows, columns, steps); });
}
#endif
