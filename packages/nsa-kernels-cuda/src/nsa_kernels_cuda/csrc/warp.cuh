// Functions of a whole warp: every lane calls them, at the same point.
#pragma once

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;
constexpr int WARP_SIZE = 32;

__device__ inline int lane_index() { return threadIdx.x % WARP_SIZE; }

// Return the sum of `value` over all lanes, in every lane.
__device__ inline int warp_sum(int value) {
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

// Return the sum of `value` over the lanes up to this one, inclusive.
__device__ inline int warp_inclusive_sum(int value) {
  for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
    const int before = __shfl_up_sync(ALL_LANES, value, offset);
    if (lane_index() >= offset) value += before;
  }
  return value;
}

// Return the `rank`-th highest of the lanes' values in every lane, rank 0 being the highest. A bitonic sort; no value is NaN.
__device__ inline float warp_ranked(float value, int rank) {
  const int lane = lane_index();
#pragma unroll
  for (int size = 2; size <= WARP_SIZE; size *= 2) {
#pragma unroll
    for (int offset = size / 2; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, value, offset);
      const bool keeps_higher = ((lane & offset) == 0) == ((lane & size) == 0);
      value = keeps_higher ? fmaxf(value, other) : fminf(value, other);
    }
  }
  return __shfl_sync(ALL_LANES, value, rank);
}
