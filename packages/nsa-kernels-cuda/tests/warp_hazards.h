// Finds accesses to shared memory that no barrier orders, in kernels that warp_emulator.h runs. A warp's clock ticks at each __syncwarp and at
// each barrier; a barrier tells every warp that waits there how far the others had come. Two accesses to a word, one of them a write, are a
// hazard if neither is known to come before the other. Shuffles, ballots and products order nothing: they are not memory fences.
//
// Reads and writes come from the compiler, which calls __tsan_* at each of them (-fsanitize=thread). warp_hazards.cpp has these functions; the
// library of that sanitizer is not linked. Without the option nothing is checked.
#pragma once

#include <cstddef>
#include <vector>

namespace hazards {

#ifdef __SANITIZE_THREAD__
// Forget all accesses: a cluster starts.
void begin(const char* memory, std::size_t pitch, std::size_t shared_bytes, int num_ranks, int num_threads);
// Attribute the following accesses to `thread` of the cluster, or to none if it is -1.
void run(int thread);
// Note a write by the running thread that the compiler does not show.
void write(const void* address, std::size_t num_bytes);
// Order accesses of the lanes of a warp before this call against later ones; each lane calls it.
void pass_syncwarp();
// Order accesses of `warps` before a barrier against those after it.
void pass_barrier(const std::vector<int>& warps);
#else
inline void begin(const char*, std::size_t, std::size_t, int, int) {}
inline void run(int) {}
inline void write(const void*, std::size_t) {}
inline void pass_syncwarp() {}
inline void pass_barrier(const std::vector<int>&) {}
#endif

}  // namespace hazards
