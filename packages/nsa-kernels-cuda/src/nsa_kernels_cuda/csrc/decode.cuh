// Eq. 5 (arXiv 2502.11089) for rows of sequences over their stores, in one launch: a cluster of CTAs for each row and KV head.
//
// 1. The CTAs of the cluster divide the compressed keys, and the warps of a CTA divide its share. A warp also sums each head's weights by
//    selection block, relative to the head's maximum at that time. The softmaxes of the warps are merged into one for the CTA.
// 2. CTAs exchange maxima and sums. Each CTA normalises its sums by selection block, adds up the group's heads (Eq. 9, 10), and writes these
//    scores to all CTAs.
// 3. One warp of every CTA makes the same choice (Eq. 11). Meanwhile some warps attend to the CTA's share of the window, whose copies
//    started in step 1. The others attend to its share of the chosen blocks.
// 4. CTAs exchange outputs, maxima and sums of the three branches. Each CTA computes a part of the output: the branches times their gates.
//
// CTAs exchange data through distributed shared memory. Nothing after a sequence's last token is read, and nothing outside the stores.
#pragma once

#include "attend.cuh"
#include "choice.cuh"
#include "placement.cuh"

constexpr int NUM_WARPS = 8;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int NUM_BRANCHES = 3;
enum Branch { CMP, SLC, WIN };          // in the order of the gates
constexpr int WEIGHT_PITCH = KEYS + 1;  // numbers of a row of weights in shared memory

template <class T>
struct Operands {
  const T *q, *k_cmp, *v_cmp, *k_slc, *v_slc, *k_win, *v_win;
  const void* gates;     // float32 or T, (sequences, heads, 3)
  const int *win_first;  // position of the window's first row; nullptr: 0
  const int *start, *count;
  T* out;
  int* indices;
};

struct Problem {
  int num_ranks;  // CTAs of a cluster
  int num_heads, num_groups;
  HeadDims dims;
  int cmp_rows, slc_rows, win_rows, is_ring, has_float_gates;
  int compression_size, stride, window;
  Selection selection;
  int log_columns;
  int num_blocks;  // selection blocks that the stores hold
  int num_win_warps, num_stages;
  float factor;  // multiplies q . k: the scale times log2(e)

  __device__ int group_size() const { return num_heads / num_groups; }
  __device__ int padded_heads() const { return (group_size() + ROWS - 1) / ROWS * ROWS; }
  // number of compressed keys that begin in one selection block: they take 2^log_columns columns of a tile
  __device__ int strides() const { return selection.block_size / stride; }
  __device__ int blocks_per_tile() const { return KEYS >> log_columns; }
  __device__ int reach() const { return compression_size / stride; }
  // numbers in the record of a tile of compressed keys, for each head: sums by block, the share for the next tile, and the maximum
  __device__ int head_pitch() const { return blocks_per_tile() + 2; }
  // an odd multiple of the blocks of a tile, so that a head's sums of neighbouring blocks are in different banks
  __device__ int record_size() const { return ((group_size() * head_pitch() + blocks_per_tile() - 1) / blocks_per_tile() | 1) * blocks_per_tile(); }
  __device__ int scratch_pitch() const { return dims.v + 8; }
  __device__ int stage_bytes() const {
    return max(KEYS * (dims.k_pitch() + dims.v_pitch()), ROWS * scratch_pitch() * static_cast<int>(sizeof(float)));
  }
};

struct Stats {
  float max, sum;
};

// The shared memory of a CTA.
struct Memory {
  char *q, *rings;
  float* outs;        // (branches, heads of the group, D_v), relative to `stats`
  float* weights;     // (warps, ROWS, WEIGHT_PITCH): of the compressed branch; reused for the outputs of the other two
  Stats* stats;       // (branches, heads)
  Stats* totals;      // (heads): maximum of the compressed branch, and 1 over its sum
  float* gates;       // (heads, branches)
  Stats* warp_stats;  // (warps, ROWS)
  float* records;     // (tiles of this CTA, record_size), after the record of the tile before the CTA's first
  float* factors;     // (ranks, branches, heads): reuses the memory of the records
  WarpMemory choice;
  int* indices;
  int num_bytes;

  __device__ Memory(char* base, const Problem& problem) : num_bytes(0) {
    const int heads = problem.group_size(), tiles = (problem.num_blocks + problem.blocks_per_tile() - 1) / problem.blocks_per_tile();
    const int num_outs = heads * problem.dims.v, size = problem.record_size();
    const int num_records = ((tiles + problem.num_ranks - 1) / problem.num_ranks + 1) * size;
    q = take<char>(base, problem.padded_heads() * problem.dims.k_pitch());
    rings = take<char>(base, NUM_WARPS * problem.num_stages * problem.stage_bytes());
    outs = take<float>(base, num_outs + max(2 * num_outs, NUM_WARPS * ROWS * WEIGHT_PITCH));
    weights = outs + num_outs;
    stats = take<Stats>(base, NUM_BRANCHES * heads);
    totals = take<Stats>(base, heads);
    gates = take<float>(base, heads * NUM_BRANCHES);
    warp_stats = take<Stats>(base, NUM_WARPS * ROWS);
    factors = take<float>(base, max(num_records, problem.num_ranks * NUM_BRANCHES * heads));
    records = factors + size;
    choice.survivors = take<Survivor>(base, MOST_SURVIVORS);
    choice.chosen = take<int>(base, WARP_SIZE);
    choice.scores = take<float>(base, (problem.num_blocks + PIECE - 1) / PIECE * PIECE);
    indices = take<int>(base, problem.selection.num_selected);
  }

  template <class T>
  __device__ T* take(char* base, int count) {
    T* taken = reinterpret_cast<T*>(base + num_bytes);
    num_bytes += (count * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
    return taken;
  }
};

// The compressed keys that a row sees, and one CTA's share of them.
struct Share {
  int num_keys, num_tiles, tiles_per_rank, first, end;

  __device__ Share(const Problem& problem, int position, int rank) {
    const int behind = position + 1 - problem.compression_size;
    const int visible = behind >= 0 ? behind / problem.stride + 1 : 0;
    num_keys = min(visible, min(problem.cmp_rows, problem.num_blocks * problem.strides()));
    const int keys_per_tile = problem.blocks_per_tile() * problem.strides();
    num_tiles = (num_keys + keys_per_tile - 1) / keys_per_tile;
    tiles_per_rank = (num_tiles + problem.num_ranks - 1) / problem.num_ranks;
    first = min(rank * tiles_per_rank, num_tiles);
    end = min(first + tiles_per_rank, num_tiles);
  }
};

__device__ inline int warp_index() { return threadIdx.x / WARP_SIZE; }

__device__ inline Tiles compressed_tiles(const Problem& problem, const Share& share) {
  const int num_keys = problem.blocks_per_tile() * problem.strides();
  return {share.first + warp_index(), NUM_WARPS, share.end, 0, num_keys, problem.strides(), problem.log_columns, share.num_keys - 1, nullptr,
          0, 1, 1ull << 32, 0, 0};
}

__device__ inline Tiles window_tiles(const Problem& problem, int first_row, int position, int rank) {
  const int num_rows = problem.is_ring ? min(problem.window, problem.win_rows) : problem.window;
  const int first_key = max(max(0, position + 1 - num_rows), first_row);
  const int last_key = problem.is_ring ? position : min(position, first_row + problem.win_rows - 1);
  return {warp_index() * problem.num_ranks + rank, problem.num_win_warps * problem.num_ranks, (last_key - first_key + KEYS) / KEYS, first_key,
          KEYS, KEYS, LOG_KEYS, last_key, nullptr, 0, 1, 1ull << 32, first_row, problem.is_ring ? problem.win_rows : 0};
}

__device__ inline Tiles selected_tiles(const Problem& problem, const Memory& memory, int position, int num_chosen, int rank) {
  const int block_size = problem.selection.block_size, tiles_per_block = (block_size + KEYS - 1) / KEYS;
  const int num_warps = NUM_WARPS - problem.num_win_warps;
  return {(warp_index() - problem.num_win_warps) * problem.num_ranks + rank, num_warps * problem.num_ranks, num_chosen * tiles_per_block, 0,
          KEYS, KEYS, LOG_KEYS, min(position, problem.slc_rows - 1), memory.indices, block_size, tiles_per_block,
          ((1ull << 32) + tiles_per_block - 1) / tiles_per_block, 0, 0};
}

// Begin to copy the group's rows of q to shared memory, and commit the group of copies; rows without a head become 0.
template <class T>
__device__ void copy_queries(const T* q, const Problem& problem, const Memory& memory) {
  const int pieces = problem.dims.k / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < problem.padded_heads() * pieces; i += NUM_THREADS) {
    const int head = i / pieces, piece = i % pieces;
    char* target = memory.q + head * problem.dims.k_pitch() + 16 * piece;
    copy_async(target, q + static_cast<long long>(head) * problem.dims.k + 8 * piece, head < problem.group_size());
  }
  commit_copies();
}

// Copy the gates of the group's heads to shared memory, as float32.
template <class T>
__device__ void load_gates(const void* gates, long long first_head, const Problem& problem, const Memory& memory) {
#pragma unroll 1
  for (int i = threadIdx.x; i < problem.group_size() * NUM_BRANCHES; i += NUM_THREADS) {
    const long long at = first_head * NUM_BRANCHES + i;
    memory.gates[i] = problem.has_float_gates ? static_cast<const float*>(gates)[at] : to_float(static_cast<const T*>(gates)[at]);
  }
}

// Write the record of a tile of compressed keys: sums of weights by head and selection block, relative to the maximum. Only the first
// `num_rows` of the ROWS rows are heads.
__device__ inline void record_tile(const Problem& problem, float* own_weights, float* record, int num_rows, const float (&weights)[2][4],
                                   const float (&maxima)[2]) {
  const int lane = lane_index(), pitch = problem.head_pitch(), strides = problem.strides(), reach = problem.reach();
  const int columns = 1 << problem.log_columns, num_blocks = problem.blocks_per_tile();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    own_weights[(lane / 4 + i % 4 / 2 * 8) * WEIGHT_PITCH + i / 4 * 8 + 2 * (lane % 4) + i % 2] = weights[i / 4][i % 4];
  }
  if (lane % 4 == 0) {
    if (lane / 4 < num_rows) record[lane / 4 * pitch + num_blocks + 1] = maxima[0];
    if (lane / 4 + 8 < num_rows) record[(lane / 4 + 8) * pitch + num_blocks + 1] = maxima[1];
  }
  __syncwarp();
  // the last sum is only the share for the block after the tile
  const int log_rows = num_rows > 1 ? 32 - __clz(num_rows - 1) : 0;
#pragma unroll 1
  for (int i = lane; i < (num_blocks + 1) << log_rows; i += WARP_SIZE) {
    const int head = i & ((1 << log_rows) - 1), block = i >> log_rows;
    const float* row = own_weights + head * WEIGHT_PITCH;
    float sum = 0.0f;
    // a lane whose block has no such key adds 0 times another key's weight, so that all lanes run the same loops
#pragma unroll 1
    for (int stride = max(0, strides - reach + 1); stride < strides; ++stride) {
      sum += (block > 0 ? static_cast<float>(stride + reach - strides) : 0.0f) * row[max(0, block - 1) * columns + stride];
    }
#pragma unroll 4
    for (int stride = 0; stride < strides; ++stride) {
      sum += (block < num_blocks ? static_cast<float>(min(reach, strides - stride)) : 0.0f) * row[min(block, num_blocks - 1) * columns + stride];
    }
    if (head < num_rows) record[head * pitch + block] = sum;
  }
}

// Write the warp's softmax to stage 0 of its ring, and to `warp_stats`.
template <int WIDTH>
__device__ void store_softmax(const Softmax<WIDTH>& softmax, const Problem& problem, const Memory& memory, const Ring& ring) {
  float* scratch = reinterpret_cast<float*>(ring.first);
  const int row = lane_index() / 4, column = 2 * (lane_index() % 4), pitch = problem.scratch_pitch();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* target = scratch + (row + 8 * half) * pitch + column;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
      if (8 * i < problem.dims.v) {
        target[8 * i] = softmax.outs[i][2 * half];
        target[8 * i + 1] = softmax.outs[i][2 * half + 1];
      }
    }
    const float sum = quad_sum(softmax.sums[half]);
    if (column == 0) memory.warp_stats[warp_index() * ROWS + row + 8 * half] = Stats{softmax.maxima[half], sum};
  }
}

// Merge the softmaxes of warps begin .. end - 1 into the CTA's, for the rows of one tile.
__device__ inline void merge_warps(const Problem& problem, const Memory& memory, Branch branch, int tile, int begin, int end) {
  constexpr int THREADS_PER_ROW = NUM_THREADS / ROWS;
  const int row = threadIdx.x / THREADS_PER_ROW, lane = threadIdx.x % THREADS_PER_ROW;
  const int slot = branch * problem.group_size() + tile * ROWS + row;
  if (tile * ROWS + row >= problem.group_size()) return;
  float largest = absent(), sum = 0.0f, kept[NUM_WARPS];
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; ++warp) {
    if (warp >= begin && warp < end) largest = fmaxf(largest, memory.warp_stats[warp * ROWS + row].max);
  }
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; ++warp) {
    kept[warp] = 0.0f;
    if (warp >= begin && warp < end) {
      const Stats stats = memory.warp_stats[warp * ROWS + row];
      kept[warp] = power_of_two(stats.max - shift_of(largest));
      sum += stats.sum * kept[warp];
    }
  }
  const int ring_bytes = problem.num_stages * problem.stage_bytes();
#pragma unroll 2
  for (int column = lane; column < problem.dims.v; column += THREADS_PER_ROW) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp) {
      if (warp >= begin && warp < end) {
        const float* scratch = reinterpret_cast<const float*>(memory.rings + warp * ring_bytes);
        total += kept[warp] * scratch[row * problem.scratch_pitch() + column];
      }
    }
    memory.outs[slot * problem.dims.v + column] = total;
  }
  if (lane == 0) memory.stats[slot] = Stats{largest, sum};
}

// Return in every lane the sum, or the maximum, over its half of the warp.
__device__ inline float half_sum(float value) {
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

__device__ inline float half_max(float value) {
  for (int offset = 8; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// Call `use(slot, rank, kept, total)` for slots 0 .. num_slots - 1 of `stats` and every rank. `total` holds maximum and sum of the cluster. A
// factor `kept` converts a number relative to the rank's maximum to the cluster's maximum. Half a warp has one slot, a lane one rank.
template <class Use>
__device__ void over_cluster(const Problem& problem, const Memory& memory, int num_slots, Use use) {
  const int rank = lane_index() % 16;
#pragma unroll 1
  for (int first = 2 * warp_index(); first < num_slots; first += 2 * NUM_WARPS) {
    const int slot = first + lane_index() / 16;
    const bool exists = slot < num_slots && rank < problem.num_ranks;
    const Stats stats = exists ? of_rank(memory.stats, rank)[slot] : Stats{absent(), 0.0f};
    const float max = half_max(stats.max), kept = power_of_two(stats.max - shift_of(max)), sum = half_sum(stats.sum * kept);
    if (exists) use(slot, rank, kept, Stats{max, sum});
  }
}

// Write the scores (Eq. 9, 10) of the selection blocks of this CTA's share to every CTA of the cluster. One thread computes one selection block.
__device__ inline void share_scores(const Problem& problem, const Memory& memory, const Share& share, int rank) {
  const int heads = problem.group_size(), num_blocks = problem.blocks_per_tile(), pitch = problem.head_pitch(), size = problem.record_size();
  // the first slots are those of the compressed branch
  over_cluster(problem, memory, heads, [&](int head, int each, float, Stats total) {
    if (each == 0) memory.totals[head] = Stats{total.max, total.sum > 0.0f ? 1.0f / total.sum : 0.0f};
  });
  // copy the last record of the previous CTA: its last share belongs to this CTA's first block
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * pitch && rank > 0 && share.first < share.end; i += NUM_THREADS) {
    memory.records[i - size] = of_rank(memory.records, rank - 1)[(share.tiles_per_rank - 1) * size + i];
  }
  __syncthreads();
  const int end = (share.end - share.first) * num_blocks;
#pragma unroll 1
  for (int block = threadIdx.x; block < end; block += NUM_THREADS) {
    const int of_tile = block % num_blocks;
    const float* record = memory.records + block / num_blocks * size;
    const bool is_reached = of_tile == 0 && share.first + block > 0;
    float score = 0.0f;
#pragma unroll 4
    for (int head = 0; head < heads; ++head) {
      const Stats total = memory.totals[head];
      const float *sums = record + head * pitch, *before = sums - size;
      const float sum = sums[of_tile], max = sums[num_blocks + 1];
      const float reaching = is_reached ? before[num_blocks] : 0.0f, max_before = is_reached ? before[num_blocks + 1] : max;
      const float scale = power_of_two(max - total.max) * total.sum;
      // equal maxima take one product, so that all blocks get equal scores if all keys are equal
      score += max == max_before ? (sum + reaching) * scale : sum * scale + reaching * (power_of_two(max_before - total.max) * total.sum);
    }
#pragma unroll 4
    for (int each = 0; each < problem.num_ranks; ++each) of_rank(memory.choice.scores, each)[share.first * num_blocks + block] = score;
  }
}

// Write this CTA's part of the output: the gated sum of the branches over all CTAs of the cluster.
template <class T>
__device__ void store_out(T* out, const Problem& problem, const Memory& memory, int rank) {
  const int heads = problem.group_size(), dim = problem.dims.v;
  over_cluster(problem, memory, NUM_BRANCHES * heads, [&](int slot, int each, float kept, Stats total) {
    const int branch = slot / heads, head = slot % heads;
    // a branch that sees no key adds 0, for any gate
    const float factor = total.sum > 0.0f ? memory.gates[head * NUM_BRANCHES + branch] / total.sum * kept : 0.0f;
    memory.factors[each * NUM_BRANCHES * heads + slot] = factor;
  });
  __syncthreads();
  const int num_numbers = heads * dim, share = (num_numbers + problem.num_ranks - 1) / problem.num_ranks;
#pragma unroll 1
  for (int i = rank * share + threadIdx.x; i < min((rank + 1) * share, num_numbers); i += NUM_THREADS) {
    float total = 0.0f;
#pragma unroll 4
    for (int each = 0; each < problem.num_ranks; ++each) {
      const float* outs = of_rank(memory.outs, each) + i;
      const float* factors = memory.factors + each * NUM_BRANCHES * heads + i / dim;
#pragma unroll
      for (int branch = 0; branch < NUM_BRANCHES; ++branch) total += factors[branch * heads] * outs[branch * heads * dim];
    }
    out[i].bits = static_cast<unsigned short>(pack(T{}, total, 0.0f));
  }
}

// `Where` is Contiguous or Placement: it says where rows and stores are.
template <class T, int WIDTH, class Where>
__device__ void decode(const Operands<T>& operands, const Problem& problem, const Where& where) {
  const int rank = cluster_rank(), pair = blockIdx.x / problem.num_ranks, warp = warp_index();
  const int row_of_q = pair / problem.num_groups, group = pair % problem.num_groups, group_size = problem.group_size();
  const long long first_head = static_cast<long long>(pair) * group_size;
  const HeadDims dims = problem.dims;
  const Selection selection = problem.selection;
  T* out = operands.out + first_head * dims.v;
  int* indices = operands.indices + static_cast<long long>(pair) * selection.num_selected;
  wait_for_previous_launch();
  const RowOfSequence row = where.row(row_of_q);
  const int sequence = row.sequence;
  if (!where.exists(row) || (operands.count != nullptr && operands.count[sequence] < row.index + 1)) {
#pragma unroll 1
    for (int i = threadIdx.x; i < group_size * dims.v && rank == 0; i += NUM_THREADS) out[i].bits = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < selection.num_selected && rank == 0; i += NUM_THREADS) indices[i] = -1;
    return;
  }
  const Memory memory(dynamic_shared(), problem);
  const Ring ring = {memory.rings + warp * problem.num_stages * problem.stage_bytes(), problem.stage_bytes(), problem.num_stages};
  copy_queries(operands.q + first_head * dims.k, problem, memory);
  const int position = operands.start[sequence] + row.index, num_head_tiles = problem.padded_heads() / ROWS;
  const Share share(problem, position, rank);
  const Candidates candidates = candidates_of(position, problem.num_blocks, selection);
  const bool is_win_warp = warp < problem.num_win_warps, scores_decide = candidates.end > selection.num_selected;
  Tiles tiles = compressed_tiles(problem, share);
  auto store = store_of(where.cmp, operands.k_cmp, operands.v_cmp, problem.dims, problem.num_groups, sequence, group, problem.cmp_rows);
  begin_tiles<WIDTH>(store, dims, ring, tiles);
  load_gates<T>(operands.gates, first_head, problem, memory);
  wait_for_copies(ring.num_stages - 1);
  __syncthreads();
  Softmax<WIDTH> softmax;
  // the compressed branch for each tile of heads, then the two others
#pragma unroll 1
  for (int pass = 0; pass < 2 * num_head_tiles; ++pass) {
    const bool is_cmp = pass < num_head_tiles;
    const int tile = is_cmp ? pass : pass - num_head_tiles;
    if (pass == num_head_tiles) {
      cluster_barrier();
      if (scores_decide) {
        share_scores(problem, memory, share, rank);
        cluster_barrier();
      }
      if (!is_win_warp) {
        const Scores<float> scores = {memory.choice.scores, nullptr, 1, problem.num_blocks, true};
        if (warp == NUM_WARPS - 1) choose_row(scores, position, selection, memory.choice, memory.indices);
        partial_barrier((NUM_WARPS - problem.num_win_warps) * WARP_SIZE);
        tiles = selected_tiles(problem, memory, position, min(candidates.end, selection.num_selected), rank);
        store = store_of(where.slc, operands.k_slc, operands.v_slc, problem.dims, problem.num_groups, sequence, group, problem.slc_rows);
      }
    }
    float* records = memory.records + tile * ROWS * problem.head_pitch();
    float* own_weights = memory.weights + warp * ROWS * WEIGHT_PITCH;
    const bool has_begun = pass == 0 || (pass == num_head_tiles && is_win_warp);
    attend(softmax, memory.q + tile * ROWS * dims.k_pitch(), store, dims, ring, tiles, has_begun, problem.factor,
           [&](int number, const float(&weights)[2][4]) {
             if (!is_cmp || !scores_decide) return;
             float* record = records + (number - share.first) * problem.record_size();
             record_tile(problem, own_weights, record, min(ROWS, group_size - tile * ROWS), weights, softmax.maxima);
           });
    store_softmax(softmax, problem, memory, ring);
    if (pass == num_head_tiles - 1 && is_win_warp) {
      // start these copies now: keys of the window arrive while blocks are chosen
      tiles = window_tiles(problem, operands.win_first == nullptr ? 0 : operands.win_first[sequence], position, rank);
      store = store_of(where.win, operands.k_win, operands.v_win, problem.dims, problem.num_groups, sequence, group, problem.win_rows);
      begin_tiles<WIDTH>(store, dims, ring, tiles);
    }
    __syncthreads();
    const int num_first = is_cmp ? NUM_WARPS : problem.num_win_warps;
    merge_warps(problem, memory, is_cmp ? CMP : WIN, tile, 0, num_first);
    if (!is_cmp) merge_warps(problem, memory, SLC, tile, num_first, NUM_WARPS);
    __syncthreads();
  }
  cluster_barrier();
  store_out(out, problem, memory, rank);
#pragma unroll 1
  for (int i = threadIdx.x; i < selection.num_selected && rank == 0; i += NUM_THREADS) indices[i] = memory.indices[i];
  // wait, because no CTA may end while another reads its shared memory
  cluster_barrier();
}

// The fields of Operands and Problem, in order.
#define DECODE_PARAMETERS(T)                                                                                                            \
  const T *q, const T *k_cmp, const T *v_cmp, const T *k_slc, const T *v_slc, const T *k_win, const T *v_win, const void *gates,        \
      const int *win_first, const int *start, const int *count, T *out, int *indices, int num_ranks, int num_heads, int num_groups,     \
      int head_dim_k, int head_dim_v, int cmp_rows, int slc_rows, int win_rows, int is_ring, int has_float_gates, int compression_size, \
      int stride, int window, int block_size, int num_selected, int num_initial, int num_local, int log_columns, int num_blocks,        \
      int num_win_warps, int num_stages, int factor_bits

#define DECODE_OPERANDS {q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, win_first, start, count, out, indices}
#define DECODE_PROBLEM                                                                                                        \
  {num_ranks, num_heads, num_groups, {head_dim_k, head_dim_v}, cmp_rows, slc_rows, win_rows, is_ring, has_float_gates,        \
   compression_size, stride, window, {block_size, num_selected, num_initial, num_local}, log_columns, num_blocks,             \
   num_win_warps, num_stages, __uint_as_float(factor_bits)}
