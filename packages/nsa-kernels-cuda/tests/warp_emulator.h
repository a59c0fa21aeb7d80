// Runs a CUDA kernel on the host, for tests: threads are coroutines that meet at collective functions of a warp, and at barriers.
//
// Clusters run one after another. In a cluster, the first CTA that can run does so until it waits for others; in a CTA, each warp runs
// until its lanes are at one barrier. The caller may reverse the order: no result may depend on it. Shared memory starts as NaN, ends in
// guard bytes, and holds NaN before an asynchronous copy was awaited and after a CTA has ended. Compile a file that includes the kernel with
// `-include warp_emulator.h`, and call `emulator::launch`.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "warp_hazards.h"

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(...)
// the functions of ptx.cuh are at the end of this file
#define PTX_CUH

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

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }

namespace emulator {

constexpr int LANES = 32;
constexpr int WORDS = 8;  // that a lane gives to a collective, at most
constexpr int STACK_BYTES = 64 * 1024;
constexpr int GUARD_BYTES = 256;
constexpr unsigned char GUARD = 0xEE;

enum class At { READY, COLLECTIVE, PART_OF_CTA, CTA, CLUSTER, END };

struct Copy {
  char* target;
  const void* source;
  int num_bytes;
  bool exists;
};

struct Thread {
  ucontext_t context;  // where it starts
  jmp_buf paused;      // where it goes on
  bool has_started;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  At at;
  int num_expected;  // threads of a barrier of a part of a CTA
  int num_collectives;
  std::deque<std::vector<Copy>> copies;  // groups, the last one open
};

struct Words {
  std::uint64_t words[WORDS];
};

struct Warp {
  // the words of each lane for its last two collectives: a lane is at most one ahead of another
  Words given[2][LANES];
  At at;
};

struct Cluster {
  int num_ranks = 1, cta_size = 0;
  std::size_t shared_bytes = 0, pitch = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::unique_ptr<char[]> memory;

  char* memory_of(int rank) { return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(memory.get()) + 15) / 16 * 16) + rank * pitch; }
};

inline Cluster cluster;
inline jmp_buf scheduler;
inline int running = 0;  // the thread, of all in the cluster
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "warp_emulator: %s\n", why);
  std::abort();
}

inline Thread& this_thread() { return cluster.threads[running]; }
inline Warp& this_warp() { return cluster.warps[running / LANES]; }
inline int this_lane() { return running % LANES; }
inline int this_rank() { return running / cluster.cta_size; }

inline void pause(At at, int num_expected = 0) {
  Thread& thread = this_thread();
  thread.at = at;
  thread.num_expected = num_expected;
  if (_setjmp(thread.paused) == 0) _longjmp(scheduler, 1);
}

// Run the thread until it pauses. A jump is much quicker than swapcontext, which asks the kernel for the mask of signals.
inline void resume(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.has_started) _longjmp(thread.paused, 1);
  thread.has_started = true;
  setcontext(&thread.context);
}

inline void start_thread() {
  body();
  pause(At::END);
}

// Contribute `words` and return the words of all lanes for the same collective.
inline const Words* exchange(unsigned mask, Words words) {
  if (mask != 0xFFFFFFFFu) fail("a collective without all lanes");
  Words* given = this_warp().given[this_thread().num_collectives++ % 2];
  given[this_lane()] = words;
  pause(At::COLLECTIVE);
  return given;
}

inline const Words* exchange(unsigned mask, std::uint64_t word) { return exchange(mask, Words{{word}}); }

// Run a warp until its lanes are at a barrier, or have ended.
inline void run_warp(int warp) {
  const int first = warp * LANES;
  do {
    for (running = first; running < first + LANES; ++running) {
      threadIdx.x = running % cluster.cta_size;
      hazards::run(running);
      resume(this_thread());
      hazards::run(-1);
    }
    const Thread& one = cluster.threads[first];
    for (int i = first; i < first + LANES; ++i) {
      const Thread& each = cluster.threads[i];
      if (each.at != one.at || each.num_collectives != one.num_collectives || each.num_expected != one.num_expected) {
        fail("lanes part before a collective");
      }
    }
    cluster.warps[warp].at = one.at;
  } while (cluster.warps[warp].at == At::COLLECTIVE);
}

// Return how many of the warps begin .. end - 1 are at the barrier.
inline int num_at(int begin, int end, At at) {
  return std::count_if(cluster.warps.begin() + begin, cluster.warps.begin() + end, [&](const Warp& warp) { return warp.at == at; });
}

// Make the warps begin .. end - 1 at the barrier ready, if they are `expected`.
inline void release(int begin, int end, At at, int expected) {
  std::vector<int> found;
  for (int warp = begin; warp < end; ++warp) {
    if (cluster.warps[warp].at == at) found.push_back(warp);
  }
  if (static_cast<int>(found.size()) != expected) return;
  for (int warp : found) cluster.warps[warp].at = At::READY;
  hazards::pass_barrier(found);
}

// Make warps ready if all warps for which they wait are at the same barrier.
inline void release() {
  const int per_cta = cluster.cta_size / LANES, num_warps = cluster.warps.size();
  release(0, num_warps, At::CLUSTER, num_warps);
  for (int begin = 0; begin < num_warps; begin += per_cta) {
    release(begin, begin + per_cta, At::CTA, per_cta);
    for (int warp = begin; warp < begin + per_cta; ++warp) {
      const int expected = cluster.threads[warp * LANES].num_expected / LANES;
      if (cluster.warps[warp].at == At::PART_OF_CTA) release(begin, begin + per_cta, At::PART_OF_CTA, expected);
    }
  }
}

// Run the CTAs of one cluster, from `first_cta` on.
inline void run_cluster(int first_cta, bool backwards) {
  for (std::size_t i = 0; i < cluster.threads.size(); ++i) {
    Thread& thread = cluster.threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = nullptr;
    thread.has_started = false;
    thread.num_collectives = 0;
    thread.copies.assign(1, {});
    makecontext(&thread.context, start_thread, 0);
  }
  for (int rank = 0; rank < cluster.num_ranks; ++rank) {
    std::memset(cluster.memory_of(rank), 0xFF, cluster.shared_bytes);
    std::memset(cluster.memory_of(rank) + cluster.shared_bytes, GUARD, GUARD_BYTES);
  }
  for (Warp& warp : cluster.warps) warp.at = At::READY;
  hazards::begin(cluster.memory_of(0), cluster.pitch, cluster.shared_bytes, cluster.num_ranks, cluster.threads.size());
  const int num_warps = cluster.warps.size(), per_cta = cluster.cta_size / LANES;
  for (int cta = 0; cta >= 0; release()) {
    cta = -1;
    for (int i = 0; i < num_warps; ++i) {
      const int warp = backwards ? num_warps - 1 - i : i;
      if (cluster.warps[warp].at != At::READY || (cta >= 0 && warp / per_cta != cta)) continue;
      cta = warp / per_cta;
      blockIdx.x = first_cta + cta;
      run_warp(warp);
    }
    // nothing may read the shared memory of a CTA that has ended
    if (cta >= 0 && num_at(cta * per_cta, (cta + 1) * per_cta, At::END) == per_cta) {
      std::memset(cluster.memory_of(cta), 0xFF, cluster.shared_bytes);
    }
  }
  for (const Warp& warp : cluster.warps) {
    if (warp.at != At::END) fail("a barrier that not all threads reach");
  }
  for (const Thread& thread : cluster.threads) {
    for (const std::vector<Copy>& group : thread.copies) {
      if (!group.empty()) fail("a copy that no thread waits for");
    }
  }
  for (int rank = 0; rank < cluster.num_ranks; ++rank) {
    const char* guard = cluster.memory_of(rank) + cluster.shared_bytes;
    if (!std::all_of(guard, guard + GUARD_BYTES, [](char byte) { return static_cast<unsigned char>(byte) == GUARD; })) {
      fail("a write behind the end of shared memory");
    }
  }
}

struct Shape {
  Index grid;  // CTAs
  int cta_size;
  std::size_t shared_bytes = 48 * 1024;
  int num_ranks = 1;       // CTAs of a cluster, along x
  bool backwards = false;  // the last CTA and warp run first
};

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Shape shape, std::type_identity_t<Parameters>... arguments) {
  body = [=] { kernel(arguments...); };
  blockDim = {shape.cta_size, 1};
  cluster.num_ranks = shape.num_ranks;
  cluster.cta_size = shape.cta_size;
  cluster.shared_bytes = shape.shared_bytes;
  cluster.pitch = (shape.shared_bytes + GUARD_BYTES + 15) / 16 * 16;
  cluster.memory.reset(new char[cluster.pitch * shape.num_ranks + 16]);
  cluster.threads.resize(shape.num_ranks * shape.cta_size);
  cluster.warps.resize(cluster.threads.size() / LANES);
  for (blockIdx.y = 0; blockIdx.y < shape.grid.y; ++blockIdx.y) {
    for (int cta = 0; cta < shape.grid.x; cta += shape.num_ranks) run_cluster(cta, shape.backwards);
  }
}

inline std::uint16_t half_of(const void* row, int column) {
  std::uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(row) + 2 * column, 2);
  return bits;
}

inline void load_matrices(unsigned (&tile)[4], const void* row, bool is_transposed) {
  const Words* rows = exchange(0xFFFFFFFFu, reinterpret_cast<std::uintptr_t>(row));
  const int lane = this_lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    tile[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      const int line = is_transposed ? 2 * (lane % 4) + i : lane / 4, column = is_transposed ? lane / 4 : 2 * (lane % 4) + i;
      tile[matrix] |= static_cast<unsigned>(half_of(reinterpret_cast<const void*>(rows[8 * matrix + line].words[0]), column)) << (16 * i);
    }
  }
}

// Lane 4 * i + j gives, of a: rows i and i + 8, columns 2 * j, 2 * j + 1, and those plus 8; of b the same rows of column i.
template <class T>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const Words* given = exchange(0xFFFFFFFFu, Words{{a[0], a[1], a[2], a[3], b0, b1}});
  const auto number = [](std::uint64_t word, int half) { return to_float(T{static_cast<unsigned short>(word >> (16 * half))}); };
  const int lane = this_lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int at = k % 8 / 2, high = k / 8;
      sum += static_cast<double>(number(given[4 * row + at].words[i / 2 + 2 * high], k % 2)) * number(given[4 * column + at].words[4 + high], k % 2);
    }
    c[i] = static_cast<float>(c[i] + sum);
  }
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  const std::uint32_t bits = emulator::exchange(mask, std::bit_cast<std::uint32_t>(value))[source % emulator::LANES].words[0];
  return std::bit_cast<T>(bits);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  return __shfl_sync(mask, value, emulator::this_lane() ^ offset);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int offset) {
  const int lane = emulator::this_lane();
  return __shfl_sync(mask, value, lane >= offset ? lane - offset : lane);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const emulator::Words* votes = emulator::exchange(mask, vote);
  unsigned bits = 0;
  for (int lane = 0; lane < emulator::LANES; ++lane) bits |= static_cast<unsigned>(votes[lane].words[0]) << lane;
  return bits;
}

inline void __syncwarp() {
  emulator::exchange(0xFFFFFFFFu, 0);
  hazards::pass_syncwarp();
}
inline void __syncthreads() { emulator::pause(emulator::At::CTA); }

// ---- ptx.cuh
#include "numbers.cuh"

inline char* dynamic_shared() { return emulator::cluster.memory_of(emulator::this_rank()); }
inline float power_of_two(float x) { return std::exp2(x); }

namespace emulator {
inline void copy_async(char* target, const char* source, int num_bytes, bool exists) {
  if (reinterpret_cast<std::uintptr_t>(target) % num_bytes != 0) fail("a copy to an address off its size");
  if (exists && reinterpret_cast<std::uintptr_t>(source) % num_bytes != 0) fail("a copy from an address off its size");
  std::memset(target, 0xFF, num_bytes);
  // the copy may write from here on, until it was waited for
  hazards::write(target, num_bytes);
  this_thread().copies.back().push_back({target, source, num_bytes, exists});
}
}  // namespace emulator

template <int OFFSET = 0>
void copy_async(void* to, const void* from, bool exists) {
  emulator::copy_async(static_cast<char*>(to) + OFFSET, static_cast<const char*>(from) + OFFSET, 16, exists);
}

inline void copy_word_async(void* to, const void* from, bool exists) {
  emulator::copy_async(static_cast<char*>(to), static_cast<const char*>(from), 4, exists);
}

inline void commit_copies() { emulator::this_thread().copies.emplace_back(); }

inline void wait_for_copies(int num_pending) {
  auto& copies = emulator::this_thread().copies;
  if (!copies.back().empty()) emulator::fail("a copy in no group");
  for (; static_cast<int>(copies.size()) - 1 > num_pending; copies.pop_front()) {
    for (const emulator::Copy& copy : copies.front()) {
      hazards::write(copy.target, copy.num_bytes);
      if (copy.exists) {
        std::memcpy(copy.target, copy.source, copy.num_bytes);
      } else {
        std::memset(copy.target, 0, copy.num_bytes);
      }
    }
  }
}

inline void load_matrices(unsigned (&tile)[4], const void* row) { emulator::load_matrices(tile, row, false); }
inline void load_transposed(unsigned (&tile)[4], const void* row) { emulator::load_matrices(tile, row, true); }

template <class T>
void multiply_add(T, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::multiply_add<T>(c, a, b0, b1);
}

// Round to nearest, ties to even.
inline unsigned bits_of(BFloat16, float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

inline unsigned bits_of(Float16, float x) {
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
  const float size = std::fabs(x);
  if (x != x) return 0x7FFFu;
  // 65520 rounds to infinity; below 2^-14 numbers are multiples of 2^-24
  if (size >= 65520.0f) return sign | 0x7C00u;
  if (size < 0x1p-14f) return sign | static_cast<unsigned>(std::nearbyint(size * 0x1p24f));
  const unsigned bits = __float_as_uint(size);
  return sign | (((bits + 0xFFFu + (bits >> 13 & 1u)) >> 13) - (112u << 10));
}

template <class T>
unsigned pack(T type, float low, float high) {
  return bits_of(type, low) | bits_of(type, high) << 16;
}

// Return an e4m3 number as float32: 4 bits of exponent with bias 7, no infinity, and NaN where all bits but the sign are 1.
inline float from_e4m3_byte(unsigned bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  const float number = (bits & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : size;
  return bits & 0x80 ? -number : number;
}

inline Pair from_e4m3(unsigned bits) { return {from_e4m3_byte(bits & 0xFF), from_e4m3_byte(bits >> 8 & 0xFF)}; }

inline void partial_barrier(int num_threads) { emulator::pause(emulator::At::PART_OF_CTA, num_threads); }
inline int cluster_rank() { return emulator::this_rank(); }
inline void cluster_barrier() { emulator::pause(emulator::At::CLUSTER); }

template <class T>
T* of_rank(T* pointer, int rank) {
  if (rank < 0 || rank >= emulator::cluster.num_ranks) emulator::fail("a rank outside the cluster");
  return pointer + (emulator::cluster.memory_of(rank) - dynamic_shared()) / static_cast<std::ptrdiff_t>(sizeof(T));
}

inline void wait_for_previous_launch() {}
