// Runs a CUDA kernel on the host, for tests: the lanes of a warp are coroutines that meet at every collective function.
//
// Warps of a grid run one after another, so a kernel may use functions of a warp and no barrier of a block. Compile a file that
// includes the kernel with `-include warp_emulator.h`, and call `emulator::launch`.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__

using std::max;
using std::min;

struct Index {
  int x, y;
};
inline Index threadIdx, blockIdx, blockDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Dynamic shared memory; kernels declare it as `extern __shared__ float4 shared[]`.
constexpr int SHARED_BYTES = 48 * 1024;
float4 shared[SHARED_BYTES / sizeof(float4)];

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }

namespace emulator {

constexpr int LANES = 32;
constexpr int STACK_BYTES = 256 * 1024;

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(STACK_BYTES);
  int num_collectives = 0;
  bool has_ended = false;
};

inline std::vector<Lane> lanes(LANES);
inline ucontext_t scheduler;
inline int running = 0;
inline std::function<void()> body;
// what each lane gave to its last two collectives: a lane is one ahead of another at most
inline std::uint32_t given[2][LANES];

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "warp_emulator: %s\n", why);
  std::abort();
}

inline void start_lane() {
  body();
  lanes[running].has_ended = true;
  swapcontext(&lanes[running].context, &scheduler);
}

// Give `value` and return what all lanes gave to the same collective.
inline const std::uint32_t* exchange(unsigned mask, std::uint32_t value) {
  if (mask != 0xFFFFFFFFu) fail("a collective without all lanes");
  Lane& lane = lanes[running];
  std::uint32_t* values = given[lane.num_collectives++ % 2];
  values[running] = value;
  swapcontext(&lane.context, &scheduler);
  return values;
}

inline void run_warp(int first_thread) {
  for (int i = 0; i < LANES; ++i) {
    Lane& lane = lanes[i];
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = STACK_BYTES;
    lane.context.uc_link = nullptr;
    lane.num_collectives = 0;
    lane.has_ended = false;
    makecontext(&lane.context, start_lane, 0);
  }
  while (!lanes[0].has_ended) {
    for (running = 0; running < LANES; ++running) {
      threadIdx.x = first_thread + running;
      swapcontext(&scheduler, &lanes[running].context);
    }
    for (const Lane& lane : lanes) {
      if (lane.has_ended != lanes[0].has_ended || lane.num_collectives != lanes[0].num_collectives) fail("lanes part before a collective");
    }
  }
}

inline void run_grid(Index grid, int block, std::function<void()> kernel) {
  body = std::move(kernel);
  blockDim = {block, 1};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
      // NaN, so that an element read before it is written shows
      std::memset(shared, 0xFF, sizeof shared);
      for (int thread = 0; thread < block; thread += LANES) run_warp(thread);
    }
  }
}

template <class T>
T from_bits(std::uint32_t bits) {
  return std::bit_cast<T>(bits);
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Index grid, int block, std::type_identity_t<Parameters>... arguments) {
  run_grid(grid, block, [=] { kernel(arguments...); });
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulator::from_bits<T>(emulator::exchange(mask, std::bit_cast<std::uint32_t>(value))[source % emulator::LANES]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  const int source = emulator::running ^ offset;
  return emulator::from_bits<T>(emulator::exchange(mask, std::bit_cast<std::uint32_t>(value))[source]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int offset) {
  const int source = emulator::running >= offset ? emulator::running - offset : emulator::running;
  return emulator::from_bits<T>(emulator::exchange(mask, std::bit_cast<std::uint32_t>(value))[source]);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const std::uint32_t* votes = emulator::exchange(mask, vote);
  unsigned bits = 0;
  for (int lane = 0; lane < emulator::LANES; ++lane) bits |= votes[lane] << lane;
  return bits;
}

inline void __syncwarp() { emulator::exchange(0xFFFFFFFFu, 0); }
