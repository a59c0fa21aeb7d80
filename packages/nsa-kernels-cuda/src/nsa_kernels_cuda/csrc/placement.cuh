// Where the rows of a decode step and the keys of its sequences lie.
#pragma once

#include "attend.cuh"

// A row of q, as row `index` of a sequence.
struct RowOfSequence {
  int sequence, index;
};

// One row of each sequence, over stores of contiguous rows in the dtype of q.
struct Contiguous {
  struct Rows {};
  Rows cmp, slc, win;

  __device__ RowOfSequence row(int row) const { return {row, 0}; }
  __device__ bool exists(RowOfSequence) const { return true; }
};

template <class T>
__device__ Store<T> store_of(Contiguous::Rows, const T* k, const T* v, HeadDims dims, int num_groups, int sequence, int group, int num_rows) {
  const int k_stride = num_groups * dims.k, v_stride = num_groups * dims.v;
  const long long row = static_cast<long long>(sequence) * num_rows;
  return {k + row * k_stride + group * dims.k, v + row * v_stride + group * dims.v, k_stride, v_stride};
}

// Several rows of each sequence, or rows of several sequences one after another, over stores that may have pages or be of FP8.
struct Placement {
  struct Rows {
    const int* table;               // (sequences, num_rows / page_rows); nullptr: rows of a sequence are contiguous
    const float *k_scale, *v_scale;  // of FP8 stores; nullptr: keys have the dtype of q
    int page_rows, num_pages;
  };
  Rows cmp, slc, win;
  const int* cu_seqlens;  // (sequences + 1); nullptr: each sequence has rows_per_sequence
  int num_sequences, rows_per_sequence;

  // All lanes of a warp must call this.
  __device__ RowOfSequence row(int row) const {
    if (cu_seqlens == nullptr) return {row / rows_per_sequence, row % rows_per_sequence};
    int num_begun = 0;
#pragma unroll 1
    for (int i = lane_index(); i <= num_sequences; i += WARP_SIZE) num_begun += cu_seqlens[i] <= row;
    const int sequence = max(warp_sum(num_begun) - 1, 0);
    return {sequence, row - cu_seqlens[sequence]};
  }
  // Return false for a row after the last sequence's rows.
  __device__ bool exists(RowOfSequence row) const { return row.sequence < num_sequences; }
};

// Keys and values of one sequence and KV head, whose rows are looked up in a page table and may be of FP8.
template <class T>
struct PlacedStore {
  const char *k, *v;               // of row 0, as are the scales
  const float *k_scale, *v_scale;  // nullptr: keys have type T
  const int* table;                // of the sequence; nullptr: rows are contiguous
  int page_rows, num_pages, num_groups;

  // Return the bytes of a row of `dim` numbers for each KV head.
  __device__ int row_bytes(int dim) const { return num_groups * dim * (k_scale == nullptr ? static_cast<int>(sizeof(T)) : 1); }

  // Return the row of the store that holds row `row` of the sequence. Entries outside the store read some page, as in the reference.
  __device__ int row(int row) const {
    if (table == nullptr) return row;
    const int page = static_cast<int>(static_cast<unsigned>(row) / static_cast<unsigned>(page_rows));
    return min(max(table[page], 0), num_pages - 1) * page_rows + row - page * page_rows;
  }
};

template <class T>
__device__ PlacedStore<T> store_of(const Placement::Rows& rows, const T* k, const T* v, HeadDims dims, int num_groups, int sequence, int group,
                                   int num_rows) {
  const bool has_pages = rows.table != nullptr;
  const long long first = has_pages ? 0 : static_cast<long long>(sequence) * num_rows;
  PlacedStore<T> store = {nullptr, nullptr, nullptr, nullptr, nullptr, rows.page_rows, rows.num_pages, num_groups};
  if (has_pages) store.table = rows.table + static_cast<long long>(sequence) * (num_rows / rows.page_rows);
  if (rows.k_scale != nullptr) {
    store.k_scale = rows.k_scale + first * num_groups + group;
    store.v_scale = rows.v_scale + first * num_groups + group;
  }
  const int k_bytes = store.row_bytes(dims.k), v_bytes = store.row_bytes(dims.v);
  store.k = reinterpret_cast<const char*>(k) + first * k_bytes + group * (k_bytes / num_groups);
  store.v = reinterpret_cast<const char*>(v) + first * v_bytes + group * (v_bytes / num_groups);
  return store;
}

// Return, in lane i, the row of the store for column i % KEYS of the warp's tile `index`; negative where there is no key.
template <class T>
__device__ int look_up(const PlacedStore<T>& store, const Tiles& tiles, int index) {
  const int tile = tiles.next + index * tiles.step;
  if (tile >= tiles.end) return -1;
  const Tiles::Span span = tiles.span(tile);
  const int key = tiles.key(span, lane_index() % KEYS);
  return key < 0 ? -1 : store.row(tiles.row_behind(tiles.row(span), key - span.first));
}

// Begin to copy one row of FP8: each 16 numbers to the place of their 16-bit values, and the row's scale after them. Eight lanes copy a row.
__device__ inline void copy_narrow(char* target, const char* source, const float* scale, int dim, bool exists) {
  const int piece = lane_index() % 8;
#pragma unroll 1
  for (int i = piece; i < dim / 16; i += 8) copy_async(target + 32 * i, source + 16 * i, exists);
  if (piece == 0) copy_word_async(target + 2 * dim, scale, exists);
}

// The same as for a plain store, but with the rows that `look_up` returned.
template <int WIDTH, class T>
__device__ void copy_tile(const PlacedStore<T>& store, HeadDims dims, char* stage, const Tiles& tiles, int index, int rows) {
  if (tiles.next + index * tiles.step < tiles.end) {
    const int piece = lane_index() % 8;
    char* v_stage = stage + KEYS * dims.k_pitch();
#pragma unroll 1
    for (int column = lane_index() / 8; column < KEYS; column += WARP_SIZE / 8) {
      const int found = __shfl_sync(ALL_LANES, rows, column), row = max(found, 0);
      const char* k = address_of_row(store.k, row, store.row_bytes(dims.k));
      const char* v = address_of_row(store.v, row, store.row_bytes(dims.v));
      char *k_row = stage + column * dims.k_pitch(), *v_row = v_stage + column * dims.v_pitch();
      if (store.k_scale == nullptr) {
        copy_pieces<MOST_DIM / 64>(k_row + 16 * piece, k + 16 * piece, dims.k / 8 - piece, found >= 0);
        copy_pieces<WIDTH / 64>(v_row + 16 * piece, v + 16 * piece, dims.v / 8 - piece, found >= 0);
      } else {
        const long long scale = static_cast<long long>(row) * store.num_groups;
        copy_narrow(k_row, k, store.k_scale + scale, dims.k, found >= 0);
        copy_narrow(v_row, v, store.v_scale + scale, dims.v, found >= 0);
      }
    }
  }
  commit_copies();
}

// Convert a row of FP8 that `copy_narrow` has copied to the type T, in place: number times scale, rounded once.
template <class T>
__device__ void widen_row(char* row, int dim) {
  const float scale = *reinterpret_cast<const float*>(row + 2 * dim);
#pragma unroll 1
  for (int i = lane_index() % 8; i < dim / 16; i += 8) {
    Four<unsigned>* numbers = reinterpret_cast<Four<unsigned>*>(row + 32 * i);
    const Four<unsigned> narrow = numbers[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Four<unsigned> wide;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const Pair found = from_e4m3(narrow.items[2 * half + pair / 2] >> 16 * (pair % 2));
        wide.items[pair] = pack(T{}, found.low * scale, found.high * scale);
      }
      numbers[half] = wide;
    }
  }
}

// Convert a tile that has arrived to the type T.
template <class T>
__device__ void widen_tile(const PlacedStore<T>& store, HeadDims dims, char* stage) {
  if (store.k_scale == nullptr) return;
#pragma unroll 1
  for (int column = lane_index() / 8; column < KEYS; column += WARP_SIZE / 8) {
    widen_row<T>(stage + column * dims.k_pitch(), dims.k);
    widen_row<T>(stage + KEYS * dims.k_pitch() + column * dims.v_pitch(), dims.v);
  }
  __syncwarp();
}
