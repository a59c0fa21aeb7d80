// The kernels of choose.cu on the host; compiled with `-include warp_emulator.h`.
#include "choose.cu"

#define EMULATE(name, T)                                                                                                                  \
  extern "C" void emulate_##name(int grid_x, int grid_y, int block, const void* scores, const float* factor, const int* positions,        \
                                 int* chosen, int num_rows, int num_heads, int num_groups, int num_blocks, int is_aligned, int block_size, \
                                 int num_selected, int num_initial, int num_local, int warp_bytes) {                                      \
    emulator::launch(name, {{grid_x, grid_y}, block}, static_cast<const T*>(scores), factor, positions, chosen, num_rows, num_heads,      \
                     num_groups, num_blocks, is_aligned, block_size, num_selected, num_initial, num_local, warp_bytes);                   \
  }

EMULATE(choose_float32, float)
EMULATE(choose_bfloat16, BFloat16)
EMULATE(choose_float16, Float16)
