// Attention of 16 rows, the heads of a group, over keys of their KV head. A warp takes 16 keys at a time, from a ring of its own in shared
// memory into which they are copied asynchronously, and has a softmax of its own.
#pragma once

#include "ptx.cuh"
#include "warp.cuh"

constexpr int ROWS = 16;     // rows of a tile of queries
constexpr int KEYS = 16;     // keys of a tile
constexpr int LOG_KEYS = 4;
constexpr int PADDING = 16;  // bytes behind each row in shared memory: eight rows of a matrix lie in different banks

// Keys and values of one sequence and KV head.
template <class T>
struct Store {
  const T *k, *v;
  long long k_stride, v_stride;  // elements from row to row
};

struct HeadDims {
  int k, v;

  __device__ int k_pitch() const { return 2 * k + PADDING; }
  __device__ int v_pitch() const { return 2 * v + PADDING; }
};

// A warp's ring: while one tile is computed with, num_stages - 1 are on their way. Tile i lies in stage (i + 1) % num_stages, so that stage
// 0 is free until num_stages - 1 tiles have been asked for.
struct Ring {
  char* first;
  int stage_bytes, num_stages;

  __device__ char* stage_of(int index) const { return first + (index + 1) % num_stages * stage_bytes; }
};

// The keys of one branch, in tiles, and those of a warp among them: numbers `next`, `next + step`, ... below `end`.
struct Tiles {
  int next, step, end;
  int first_key;          // of tile 0
  int num_keys;           // from one tile to the next; of these a run of `run` keys takes each 2^log_columns columns
  int run, log_columns;
  int last_key;           // inclusive
  const int* indices;     // chosen blocks of `block_size` keys, `tiles_per_block` tiles each; nullptr: tiles stand side by side
  int block_size, tiles_per_block;
  int first_row, ring_rows;  // the store's row 0 has key `first_row`; ring_rows: of a ring, 0 where it is none

  // The keys of one tile: `first` is that of column 0.
  struct Span {
    int first, last;
  };

  __device__ int count() const { return max(0, (end - next + step - 1) / step); }

  __device__ Span span(int tile) const {
    if (indices == nullptr) return {first_key + tile * num_keys, last_key};
    const int first = indices[tile / tiles_per_block] * block_size;
    return {first + tile % tiles_per_block * num_keys, min(last_key, first + block_size - 1)};
  }
  // Return the key of a column; negative where there is none.
  __device__ int key(Span span, int column) const {
    const int in_run = column & ((1 << log_columns) - 1), key = span.first + (column >> log_columns) * run + in_run;
    return in_run < run && key <= span.last ? key : -1;
  }
  __device__ int row(int key) const { return ring_rows > 0 ? key % ring_rows : key - first_row; }
};

// The softmax of a warp. A lane has rows lane / 4 and lane / 4 + 8; of each 8 columns those from 2 * (lane % 4) on, two.
template <int WIDTH>
struct Softmax {
  float outs[WIDTH / 8][4];
  float maxima[2];
  float sums[2];  // of this lane's keys alone

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) outs[i][j] = 0.0f;
    }
    maxima[0] = maxima[1] = absent();
    sums[0] = sums[1] = 0.0f;
  }
};

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// Return what is subtracted from scores whose maximum is `largest`: 0 where there is no key.
__device__ inline float shift_of(float largest) { return largest == absent() ? 0.0f : largest; }

// Begin to copy the warp's tile `index`, and close the group of copies, which is empty behind the last tile. Columns without a key become 0.
template <class T>
__device__ void copy_tile(const Store<T>& store, HeadDims dims, const Ring& ring, const Tiles& tiles, int index) {
  const int tile = tiles.next + index * tiles.step;
  if (tile < tiles.end) {
    char* k_stage = ring.stage_of(index);
    char* v_stage = k_stage + KEYS * dims.k_pitch();
    const Tiles::Span span = tiles.span(tile);
#pragma unroll 1
    for (int column = lane_index() / 8; column < KEYS; column += WARP_SIZE / 8) {
      const int key = tiles.key(span, column);
      const long long row = key < 0 ? 0 : tiles.row(key);
      const T *k = store.k + row * store.k_stride, *v = store.v + row * store.v_stride;
#pragma unroll 4
      for (int i = lane_index() % 8; i < dims.k / 8; i += 8) copy_async(k_stage + column * dims.k_pitch() + 16 * i, k + 8 * i, key >= 0);
#pragma unroll 4
      for (int i = lane_index() % 8; i < dims.v / 8; i += 8) copy_async(v_stage + column * dims.v_pitch() + 16 * i, v + 8 * i, key >= 0);
    }
  }
  commit_copies();
}

// Begin to copy the first num_stages - 1 tiles, into all stages but stage 0.
template <class T>
__device__ void begin_tiles(const Store<T>& store, HeadDims dims, const Ring& ring, const Tiles& tiles) {
#pragma unroll 1
  for (int index = 0; index < ring.num_stages - 1; ++index) copy_tile(store, dims, ring, tiles, index);
}

// Add a tile of keys and values in shared memory to the softmax, and give the keys' weights relative to the maxima, in the layout of
// `outs`. `factor` multiplies products; weights are powers of two.
template <class T, int WIDTH>
__device__ void fold_tile(Softmax<WIDTH>& softmax, const char* q, const char* k_stage, HeadDims dims, const Tiles& tiles, int tile, float factor,
                          float (&weights)[2][4]) {
  const int lane = lane_index();
  const Tiles::Span span = tiles.span(tile);
  const char* q_row = q + lane % 16 * dims.k_pitch() + lane / 16 * 16;
  const char* k_row = k_stage + (lane / 16 * 8 + lane % 8) * dims.k_pitch() + lane / 8 % 2 * 16;
  const char* v_row = k_stage + KEYS * dims.k_pitch() + lane % 16 * dims.v_pitch() + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i / 4][i % 4] = 0.0f;
#pragma unroll 4
  for (int column = 0; column < dims.k; column += 16) {
    unsigned rows[4], keys[4];
    load_matrices(rows, q_row + 2 * column);
    load_matrices(keys, k_row + 2 * column);
    multiply_add(T{}, weights[0], rows, keys[0], keys[1]);
    multiply_add(T{}, weights[1], rows, keys[2], keys[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = absent();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = weights[i / 2][2 * half + i % 2];
      // no fused multiply-add later: equal products are equal scores
      score = tiles.key(span, i / 2 * 8 + 2 * (lane % 4) + i % 2) < 0 ? absent() : __fmul_rn(score, factor);
      largest = fmaxf(largest, score);
    }
    largest = fmaxf(softmax.maxima[half], quad_max(largest));
    const float shift = shift_of(largest);
    const float kept = power_of_two(softmax.maxima[half] - shift);
    softmax.maxima[half] = largest;
    softmax.sums[half] *= kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& weight = weights[i / 2][2 * half + i % 2];
      weight = power_of_two(weight - shift);
      softmax.sums[half] += weight;
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
      softmax.outs[i][2 * half] *= kept;
      softmax.outs[i][2 * half + 1] *= kept;
    }
  }
  const unsigned shares[4] = {pack(T{}, weights[0][0], weights[0][1]), pack(T{}, weights[0][2], weights[0][3]),
                              pack(T{}, weights[1][0], weights[1][1]), pack(T{}, weights[1][2], weights[1][3])};
#pragma unroll
  for (int i = 0; i < WIDTH / 16; ++i) {
    if (16 * i < dims.v) {
      unsigned values[4];
      load_transposed(values, v_row + 32 * i);
      multiply_add(T{}, softmax.outs[2 * i], shares, values[0], values[1]);
      multiply_add(T{}, softmax.outs[2 * i + 1], shares, values[2], values[3]);
    }
  }
}

// Attend to the warp's tiles; `begin_tiles` has been called where `has_begun`. `after(tile, weights)` is called
// behind each, with the keys' weights relative to the maxima of the softmax at that time.
template <class T, int WIDTH, class After>
__device__ void attend(Softmax<WIDTH>& softmax, const char* q, const Store<T>& store, HeadDims dims, const Ring& ring, const Tiles& tiles,
                       bool has_begun, float factor, After after) {
  softmax.clear();
  const int ahead = ring.num_stages - 1, count = tiles.count();
#pragma unroll 1
  for (int index = has_begun ? 0 : -ahead; index < count; ++index) {
    copy_tile(store, dims, ring, tiles, index + ahead);
    if (index < 0) continue;
    wait_for_copies(ahead);
    __syncwarp();
    const int tile = tiles.next + index * tiles.step;
    float weights[2][4];
    fold_tile<T>(softmax, q, ring.stage_of(index), dims, tiles, tile, factor, weights);
    after(tile, weights);
    // every lane has read the stage that the next copy overwrites
    __syncwarp();
  }
}
