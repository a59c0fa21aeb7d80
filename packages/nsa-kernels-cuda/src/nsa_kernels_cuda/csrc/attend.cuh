// Attention of 16 rows, the heads of a group, over keys of their KV head. Each warp has its own softmax and its own ring
// buffer in shared memory, into which it copies 16 keys at a time asynchronously.
#pragma once

#include "ptx.cuh"
#include "warp.cuh"

constexpr int ROWS = 16;     // rows of a tile of queries
constexpr int KEYS = 16;     // keys of a tile
constexpr int LOG_KEYS = 4;
constexpr int MOST_DIM = 256;
constexpr int PADDING = 16;  // bytes after each row in shared memory, so that eight rows of a matrix are in different banks

// Keys and values of one sequence and KV head.
template <class T>
struct Store {
  const T *k, *v;
  int k_stride, v_stride;  // elements from row to row
};

struct HeadDims {
  int k, v;

  __device__ int k_pitch() const { return 2 * k + PADDING; }
  __device__ int v_pitch() const { return 2 * v + PADDING; }
};

// A warp's ring buffer: while the warp computes with one tile, num_stages - 1 tiles are in flight. Tile i is in stage (i + 1) % num_stages, so
// that stage 0 stays free until num_stages - 1 tiles are in flight.
struct Ring {
  char* first;
  int stage_bytes, num_stages;

  __device__ int after(int stage) const { return stage + 1 < num_stages ? stage + 1 : 0; }
  __device__ char* address_of(int stage) const { return first + stage * stage_bytes; }
};

// The tiles of keys of one branch, and a warp's share of them: tiles `next`, `next + step`, ... below `end`.
struct Tiles {
  int next, step, end;
  int first_key;          // of tile 0
  int num_keys;           // from one tile to the next; every `run` of these keys take 2^log_columns columns of the tile
  int run, log_columns;
  int last_key;           // inclusive
  const int* indices;     // chosen blocks of `block_size` keys, `tiles_per_block` tiles each; nullptr: tiles are contiguous
  int block_size, tiles_per_block;
  unsigned long long reciprocal;  // 2^32 / tiles_per_block, rounded up: a product is faster than a division
  int first_row, ring_rows;  // the store's row 0 has key `first_row`; ring_rows: rows of a ring, 0 without a ring

  // The keys of one tile: column 0 holds key `first`.
  struct Span {
    int first, last;
  };

  __device__ int count() const { return max(0, (end - next + step - 1) / step); }

  __device__ Span span(int tile) const {
    if (indices == nullptr) return {first_key + tile * num_keys, last_key};
    const int slot = static_cast<int>(tile * reciprocal >> 32), first = indices[slot] * block_size;
    return {first + (tile - slot * tiles_per_block) * num_keys, min(last_key, first + block_size - 1)};
  }
  // Return the key of a column; negative if there is none.
  __device__ int key(Span span, int column) const {
    const int in_run = column & ((1 << log_columns) - 1), key = span.first + (column >> log_columns) * run + in_run;
    return in_run < run && key <= span.last ? key : -1;
  }
  // Return the row of a span's first key.
  __device__ int row(Span span) const { return ring_rows > 0 ? span.first % ring_rows : span.first - first_row; }
  // Return the row that is `num_keys` keys after `row`. A ring has a row for each visible key, so one subtraction is enough.
  __device__ int row_behind(int row, int num_keys) const {
    const int behind = row + num_keys;
    return ring_rows > 0 && behind >= ring_rows ? behind - ring_rows : behind;
  }
};

// The softmax of a warp. A lane has rows lane / 4 and lane / 4 + 8; of each 8 columns it has 2 * (lane % 4) and the next one.
template <int WIDTH>
struct Softmax {
  float outs[WIDTH / 8][4];
  float maxima[2];
  float sums[2];  // of this lane's keys only

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

// Return the number to subtract from scores whose maximum is `largest`: the maximum, or 0 if there is no key.
__device__ inline float shift_of(float largest) { return largest == absent() ? 0.0f : largest; }

// Begin to copy 16 bytes of every 128, at most COUNT times; `num_left` is the number of 16-byte pieces that are left of the row.
template <int COUNT, int INDEX = 0>
__device__ void copy_pieces(char* target, const char* source, int num_left, bool exists) {
  if constexpr (INDEX < COUNT) {
    if (8 * INDEX < num_left) copy_async<128 * INDEX>(target, source, exists);
    copy_pieces<COUNT, INDEX + 1>(target, source, num_left, exists);
  }
}

// Return the address of a row. Both factors of the offset have 32 bits, so that it takes one instruction.
template <class T>
__device__ const char* address_of_row(const T* first, int row, int stride) {
  const unsigned bytes = static_cast<unsigned>(stride) * static_cast<unsigned>(sizeof(T));
  return reinterpret_cast<const char*>(first) + static_cast<unsigned long long>(static_cast<unsigned>(row)) * bytes;
}

// A plain store needs no look-up of rows, and its numbers already have the dtype of q; placement.cuh has the other stores.
struct NoLookUp {};

template <class T>
__device__ NoLookUp look_up(const Store<T>&, const Tiles&, int) {
  return {};
}

template <class T>
__device__ void widen_tile(const Store<T>&, HeadDims, char*) {}

// Begin to copy the warp's tile `index`, and commit the group of copies, which is empty after the last tile. Columns without a key become 0.
// Eight lanes copy a row, each 16 bytes at a time. All addresses are computed before the copies, because few other warps could hide their latency.
template <int WIDTH, class T>
__device__ void copy_tile(const Store<T>& store, HeadDims dims, char* stage, const Tiles& tiles, int index, NoLookUp) {
  const int tile = tiles.next + index * tiles.step;
  if (tile < tiles.end) {
    const int piece = lane_index() % 8;
    const Tiles::Span span = tiles.span(tile);
    const int first_row = tiles.row(span);
    char* k_stage = stage + 16 * piece;
    char* v_stage = k_stage + KEYS * dims.k_pitch();
#pragma unroll(WIDTH > 128 ? 2 : 4)
    for (int column = lane_index() / 8; column < KEYS; column += WARP_SIZE / 8) {
      const int key = tiles.key(span, column), row = key < 0 ? 0 : tiles.row_behind(first_row, key - span.first);
      const char* k = address_of_row(store.k, row, store.k_stride) + 16 * piece;
      const char* v = address_of_row(store.v, row, store.v_stride) + 16 * piece;
      copy_pieces<MOST_DIM / 64>(k_stage + column * dims.k_pitch(), k, dims.k / 8 - piece, key >= 0);
      copy_pieces<WIDTH / 64>(v_stage + column * dims.v_pitch(), v, dims.v / 8 - piece, key >= 0);
    }
  }
  commit_copies();
}

// Begin to copy the first num_stages - 1 tiles, into all stages but stage 0.
template <int WIDTH, class AnyStore>
__device__ void begin_tiles(const AnyStore& store, HeadDims dims, const Ring& ring, const Tiles& tiles) {
  auto rows = look_up(store, tiles, 0);
#pragma unroll 1
  for (int stage = 1; stage < ring.num_stages; ++stage) {
    const auto next_rows = look_up(store, tiles, stage);
    copy_tile<WIDTH>(store, dims, ring.address_of(stage), tiles, stage - 1, rows);
    rows = next_rows;
  }
}

// Add a tile of keys and values in shared memory to the softmax. Return the keys' weights relative to the maxima, in the layout of `outs`.
// `factor` multiplies the products q . k; the base of the exponential is 2.
template <class T, int WIDTH>
__device__ void fold_tile(Softmax<WIDTH>& softmax, const char* q, const char* k_stage, HeadDims dims, const Tiles& tiles, int tile, float factor,
                          float (&weights)[2][4]) {
  // number of matrices that are loaded before the first is multiplied; wider outputs leave registers for fewer
  constexpr int IN_FLIGHT = WIDTH > 128 ? 1 : 4;
  const int lane = lane_index();
  const Tiles::Span span = tiles.span(tile);
  const char* q_row = q + lane % 16 * dims.k_pitch() + lane / 16 * 16;
  const char* k_row = k_stage + (lane / 16 * 8 + lane % 8) * dims.k_pitch() + lane / 8 % 2 * 16;
  const char* v_row = k_stage + KEYS * dims.k_pitch() + lane % 16 * dims.v_pitch() + lane / 16 * 16;
  // with several matrices in flight, two sums take turns over the pieces of 16 numbers of a row, so a product need not wait for the previous one
  float odd[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i / 4][i % 4] = odd[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < dims.k; first += 16 * IN_FLIGHT) {
    unsigned rows[IN_FLIGHT][4], keys[IN_FLIGHT][4];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (first + 16 * i < dims.k) {
        load_matrices(rows[i], q_row + 2 * (first + 16 * i));
        load_matrices(keys[i], k_row + 2 * (first + 16 * i));
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (first + 16 * i < dims.k) {
        multiply_add(T{}, i % 2 == 0 ? weights[0] : odd[0], rows[i], keys[i][0], keys[i][1]);
        multiply_add(T{}, i % 2 == 0 ? weights[1] : odd[1], rows[i], keys[i][2], keys[i][3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i / 4][i % 4] += odd[i / 4][i % 4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = absent();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = weights[i / 2][2 * half + i % 2];
      // rounded here, so that no fused multiply-add follows: equal products then give equal scores
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
  for (int first = 0; first < WIDTH / 16; first += IN_FLIGHT) {
    unsigned values[IN_FLIGHT][4];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (16 * (first + i) < dims.v) load_transposed(values[i], v_row + 32 * (first + i));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (16 * (first + i) < dims.v) {
        multiply_add(T{}, softmax.outs[2 * (first + i)], shares, values[i][0], values[i][1]);
        multiply_add(T{}, softmax.outs[2 * (first + i) + 1], shares, values[i][2], values[i][3]);
      }
    }
  }
}

// Attend to the warp's tiles. `has_begun`: `begin_tiles` has already been called. `after(tile, weights)` is called after each tile, with
// the keys' weights relative to the maxima of the softmax at that time.
template <template <class> class AnyStore, class T, int WIDTH, class After>
__device__ void attend(Softmax<WIDTH>& softmax, const char* q, const AnyStore<T>& store, HeadDims dims, const Ring& ring, const Tiles& tiles,
                       bool has_begun, float factor, After after) {
  softmax.clear();
  const int ahead = ring.num_stages - 1, count = tiles.count();
  int stage = has_begun ? 0 : ring.after(0);
  auto rows = look_up(store, tiles, has_begun ? ahead : 0);
#pragma unroll 1
  for (int index = has_begun ? 0 : -ahead; index < count; ++index) {
    copy_tile<WIDTH>(store, dims, ring.address_of(stage), tiles, index + ahead, rows);
    // look up the next tile's rows now: the table's entries arrive while this tile is computed
    rows = look_up(store, tiles, index + ahead + 1);
    stage = ring.after(stage);
    if (index < 0) continue;
    wait_for_copies(ahead);
    __syncwarp();
    widen_tile(store, dims, ring.address_of(stage));
    const int tile = tiles.next + index * tiles.step;
    float weights[2][4];
    fold_tile<T>(softmax, q, ring.address_of(stage), dims, tiles, tile, factor, weights);
    after(tile, weights);
    // wait until every lane has read the stage that the next copy overwrites
    __syncwarp();
  }
}
