// The choice of blocks as a separate kernel: one warp per row.
#include "choice.cuh"
#include "ptx.cuh"

// Scores are (rows, heads, blocks) if there is a `factor` (rows, heads), else (rows, groups, blocks). Grid: one warp for each row along x, and
// the groups along y. A warp has `warp_bytes` of shared memory, a multiple of 16.
template <class T>
__device__ void choose(const T* scores, const float* factor, const int* positions, int* chosen, int num_rows, int num_heads, int num_groups,
                       int num_blocks, int is_aligned, Selection selection, int warp_bytes) {
  const int warp = threadIdx.x / WARP_SIZE;
  const int row = blockIdx.x * (blockDim.x / WARP_SIZE) + warp;
  if (row >= num_rows) return;
  char* bytes = dynamic_shared() + warp * warp_bytes;
  WarpMemory memory;
  memory.survivors = reinterpret_cast<Survivor*>(bytes);
  memory.chosen = reinterpret_cast<int*>(memory.survivors + MOST_SURVIVORS);
  memory.scores = reinterpret_cast<float*>(memory.chosen + WARP_SIZE);
  const int heads = num_heads / num_groups;
  const long long head = static_cast<long long>(row) * num_heads + blockIdx.y * heads;
  const long long slot = (static_cast<long long>(row) * num_groups + blockIdx.y) * selection.num_selected;
  const Scores<T> source = {scores + head * num_blocks, factor == nullptr ? nullptr : factor + head, heads, num_blocks, is_aligned != 0};
  choose_row(source, positions[row], selection, memory, chosen + slot);
}

#define CHOOSE_KERNEL(name, T)                                                                                                        \
  extern "C" __global__ void name(const T* scores, const float* factor, const int* positions, int* chosen, int num_rows,              \
                                  int num_heads, int num_groups, int num_blocks, int is_aligned, int block_size, int num_selected,    \
                                  int num_initial, int num_local, int warp_bytes) {                                                   \
    choose<T>(scores, factor, positions, chosen, num_rows, num_heads, num_groups, num_blocks, is_aligned,                             \
              Selection{block_size, num_selected, num_initial, num_local}, warp_bytes);                                               \
  }

CHOOSE_KERNEL(choose_float32, float)
CHOOSE_KERNEL(choose_bfloat16, BFloat16)
CHOOSE_KERNEL(choose_float16, Float16)
