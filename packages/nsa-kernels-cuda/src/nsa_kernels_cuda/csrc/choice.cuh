// The choice of blocks (Eq. 10, 11, arXiv 2502.11089): one warp per row, which is a query of one KV head.
//
// The warp copies the row's scores to shared memory, and each lane keeps the highest of its own. The `wanted`-th highest of the 32 lane maxima
// is a lower bound of the `wanted`-th highest score. Usually few scores are at or above this bound. The warp lists these survivors, and
// ranks each by comparing it with all others. If there are too many (equal scores), or more blocks are wanted than there are lanes, the
// warp finds the `wanted`-th highest score bit by bit. Both ways give the same choice: the highest scores, ties to the lower block, ascending.

#pragma once

#include "numbers.cuh"
#include "warp.cuh"

constexpr float HIGHEST = 3.402823466e38f;
constexpr int PIECE = 4 * WARP_SIZE;      // scores that a warp stages at a time, four neighbours to a lane
constexpr int PIECES = 8;                 // pieces whose survivors fit one word of bits per lane
constexpr int MOST_SURVIVORS = 128;

struct Selection {
  int block_size, num_selected, num_initial, num_local;
};

// Blocks 0 .. end - 1 are visible. Blocks free_begin .. free_end - 1 compete for `wanted` slots; the others are forced.
struct Candidates {
  int end, free_begin, free_end, wanted;
};

struct Survivor {
  float score;
  int block;
};

// A warp's shared memory; `scores` has room for whole pieces.
struct WarpMemory {
  Survivor* survivors;  // MOST_SURVIVORS
  int* chosen;          // WARP_SIZE
  float* scores;
};

// Scores of one row: those of its KV head, or of each head of the group with the factors that multiply them.
template <class T>
struct Scores {
  const T* first;        // of the group's first head
  const float* factor;   // of the same head; nullptr: 1
  int num_heads;         // of the group
  int num_blocks;
  bool is_aligned;       // a head's scores start at a multiple of four elements

  // Return the sums over heads, added in ascending order, for blocks begin .. begin + 3; 0 for blocks that do not exist.
  __device__ float4 load(int begin) const {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int head = 0; head < num_heads; ++head) {
      const T* source = first + static_cast<long long>(head) * num_blocks + begin;
      const float weight = factor == nullptr ? 1.0f : factor[head];
      Four<T> loaded;
      if (is_aligned) {
        loaded = *reinterpret_cast<const Four<T>*>(source);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded.items[i] = begin + i < num_blocks ? source[i] : T{};
      }
#pragma unroll
      // no fused multiply-add: the product is rounded before it is added, as in the reference
      for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(to_float(loaded.items[i]), weight));
    }
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
};

__device__ inline Candidates candidates_of(int position, int num_blocks, Selection selection) {
  const int own = position >= 0 ? position / selection.block_size : -1;
  Candidates found;
  found.end = min(own + 1, num_blocks);
  found.free_begin = selection.num_initial;
  found.free_end = min(own + 1 - selection.num_local, num_blocks);
  found.wanted = selection.num_selected - selection.num_initial - (found.end - found.free_end);
  return found;
}

// Return a score as it is compared: NaN counts as 0 and infinity as the largest number, as in the reference; -infinity for a block that is not free.
__device__ inline float comparable(float score, int block, Candidates candidates) {
  if (block < candidates.free_begin || block >= candidates.free_end) return absent();
  return score == score ? fminf(fmaxf(score, -HIGHEST), HIGHEST) : 0.0f;
}

// Copy the scores to shared memory in whole pieces, up to free_end; return this lane's highest score.
template <class T>
__device__ float stage_scores(const Scores<T>& scores, Candidates candidates, float* staged) {
  float highest = absent();
#pragma unroll 2
  for (int piece = 0; piece < candidates.free_end; piece += PIECE) {
    const int block = piece + 4 * lane_index();
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (block < candidates.free_end) four = scores.load(block);
    four.x = comparable(four.x, block, candidates);
    four.y = comparable(four.y, block + 1, candidates);
    four.z = comparable(four.z, block + 2, candidates);
    four.w = comparable(four.w, block + 3, candidates);
    *reinterpret_cast<float4*>(staged + block) = four;
    highest = fmaxf(highest, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
  }
  __syncwarp();
  return highest;
}

// List the blocks whose score is at least `bound`, in any order, and return their number; no more than MOST_SURVIVORS are listed.
__device__ inline int list_survivors(const WarpMemory& memory, int free_end, float bound) {
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < free_end; begin += PIECES * PIECE) {
    unsigned survives = 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const int block = begin + piece * PIECE + 4 * lane_index();
      if (begin + piece * PIECE < free_end) {
        const float4 four = *reinterpret_cast<const float4*>(memory.scores + block);
        survives |= (four.x >= bound ? 1u : 0u) << (4 * piece);
        survives |= (four.y >= bound ? 2u : 0u) << (4 * piece);
        survives |= (four.z >= bound ? 4u : 0u) << (4 * piece);
        survives |= (four.w >= bound ? 8u : 0u) << (4 * piece);
      }
    }
    const int last = warp_inclusive_sum(__popc(survives));
    int slot = count + last - __popc(survives);
    count += __shfl_sync(ALL_LANES, last, WARP_SIZE - 1);
#pragma unroll 1
    for (; survives != 0; survives &= survives - 1, ++slot) {
      const int bit = __ffs(survives) - 1;
      const int block = begin + bit / 4 * PIECE + 4 * lane_index() + bit % 4;
      if (slot < MOST_SURVIVORS) memory.survivors[slot] = Survivor{memory.scores[block], block};
    }
  }
  __syncwarp();
  return count;
}

// Write the `wanted` highest of the listed survivors, by ascending block. At most WARP_SIZE are wanted.
__device__ inline void choose_survivors(const WarpMemory& memory, int num_survivors, int wanted, int* target) {
#pragma unroll 1
  for (int index = lane_index(); index < num_survivors; index += WARP_SIZE) {
    const Survivor mine = memory.survivors[index];
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < num_survivors; ++i) {
      const Survivor other = memory.survivors[i];
      rank += other.score > mine.score || (other.score == mine.score && other.block < mine.block);
    }
    if (rank < wanted) memory.chosen[rank] = mine.block;
  }
  __syncwarp();
  if (lane_index() < wanted) {
    const int block = memory.chosen[lane_index()];
    int slot = 0;
#pragma unroll 4
    for (int i = 0; i < wanted; ++i) slot += memory.chosen[i] < block;
    target[slot] = block;
  }
}

// Return an integer that has the order of the scores. No score is -0, because scores are sums that start at 0.
__device__ inline unsigned ordered_bits(float score) {
  const unsigned bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline int count_from(const float* scores, int free_end, unsigned lowest) {
  int count = 0;
#pragma unroll 1
  for (int block = lane_index(); block < free_end; block += WARP_SIZE) count += ordered_bits(scores[block]) >= lowest;
  return warp_sum(count);
}

// Write the `wanted` highest free blocks, by ascending block, for any number of them and of equal scores.
__device__ inline void choose_by_bits(const float* scores, int free_end, int wanted, int* target) {
  unsigned threshold = 0;
#pragma unroll 1
  for (unsigned bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (count_from(scores, free_end, threshold | bit) >= wanted) threshold |= bit;
  }
  const unsigned before_mine = (1u << lane_index()) - 1;
  const int num_ties_chosen = wanted - count_from(scores, free_end, threshold + 1);
  int num_ties = 0, slot = 0;
#pragma unroll 1
  for (int begin = 0; begin < free_end; begin += WARP_SIZE) {
    const int block = begin + lane_index();
    const unsigned bits = block < free_end ? ordered_bits(scores[block]) : 0u;
    const unsigned ties = __ballot_sync(ALL_LANES, bits == threshold);
    const bool wins_tie = bits == threshold && num_ties + __popc(ties & before_mine) < num_ties_chosen;
    const unsigned chosen = __ballot_sync(ALL_LANES, bits > threshold || wins_tie);
    if (chosen >> lane_index() & 1u) target[slot + __popc(chosen & before_mine)] = block;
    num_ties += __popc(ties);
    slot += __popc(chosen);
  }
}

// Write the choice of one row: num_selected blocks, ascending, -1 after the last.
template <class T>
__device__ void choose_row(const Scores<T>& scores, int position, Selection selection, const WarpMemory& memory, int* target) {
  const Candidates candidates = candidates_of(position, scores.num_blocks, selection);
  if (candidates.end <= selection.num_selected) {
#pragma unroll 1
    for (int slot = lane_index(); slot < selection.num_selected; slot += WARP_SIZE) target[slot] = slot < candidates.end ? slot : -1;
    return;
  }
  int* after_free = target + selection.num_initial + candidates.wanted;
#pragma unroll 1
  for (int slot = lane_index(); slot < selection.num_initial; slot += WARP_SIZE) target[slot] = slot;
#pragma unroll 1
  for (int block = candidates.free_end + lane_index(); block < candidates.end; block += WARP_SIZE) {
    after_free[block - candidates.free_end] = block;
  }
  if (candidates.wanted == 0) return;
  const float lane_highest = stage_scores(scores, candidates, memory.scores);
  int num_survivors = MOST_SURVIVORS + 1;
  if (candidates.wanted <= WARP_SIZE) {
    // a lane without free blocks has the maximum -infinity; no score is below that bound
    const float bound = fmaxf(warp_ranked(lane_highest, candidates.wanted - 1), -HIGHEST);
    num_survivors = list_survivors(memory, candidates.free_end, bound);
  }
  if (num_survivors <= MOST_SURVIVORS) {
    choose_survivors(memory, num_survivors, candidates.wanted, target + selection.num_initial);
  } else {
    choose_by_bits(memory.scores, candidates.free_end, candidates.wanted, target + selection.num_initial);
  }
}
