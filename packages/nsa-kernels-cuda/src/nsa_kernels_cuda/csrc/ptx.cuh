// Instructions of PTX as functions, and the addresses that they take. tests/warp_emulator.h has a form of each for the host.
#ifndef PTX_CUH
#define PTX_CUH

#include "numbers.cuh"

__device__ inline char* dynamic_shared() {
  extern __shared__ float4 shared[];
  return reinterpret_cast<char*>(shared);
}

__device__ inline unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Return 2 to the power of x; 0 for -infinity.
__device__ inline float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Copy 16 bytes to shared memory asynchronously. The instruction adds `OFFSET` bytes to both addresses. If the source does not exist, write
// zeros and read nothing.
template <int OFFSET = 0>
__device__ inline void copy_async(void* target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %3], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(exists ? 16 : 0),
               "n"(OFFSET)
               : "memory");
}

// The same, of 4 bytes.
__device__ inline void copy_word_async(void* target, const void* source, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)), "l"(source), "r"(exists ? 4 : 0) : "memory");
}

// Commit this thread's group of copies, which may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all of this thread's groups of copies except the last `num_pending` (0 to 3).
__device__ inline void wait_for_copies(int num_pending) {
  if (num_pending == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (num_pending == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (num_pending == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  if (num_pending == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
}

// Load four 8 x 8 matrices of 16-bit numbers. Lane i passes the address of row i % 8 of matrix i / 8. Afterwards it holds columns 2 * (i % 4)
// and 2 * (i % 4) + 1 of row i / 4 of each matrix.
__device__ inline void load_matrices(unsigned (&tile)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, of the transposed matrices.
__device__ inline void load_transposed(unsigned (&tile)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(shared_address(row))
               : "memory");
}

// Add the product of a, 16 x 16, and b, 16 x 8, to c, 16 x 8: mma.m16n8k16, float32 accumulation.
__device__ inline void multiply_add(BFloat16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(Float16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Return two numbers rounded to 16 bits, `low` in the lower half.
__device__ inline unsigned pack(BFloat16, float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline unsigned pack(Float16, float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Return two numbers of FP8 (e4m3, the lower one in bits 0 .. 7), exactly.
__device__ inline Pair from_e4m3(unsigned bits) {
  Pair found;
  asm("{\n.reg .b32 halves;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 halves, %2;\nmov.b32 {low, high}, halves;\n"
      "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(found.low), "=f"(found.high)
      : "h"(static_cast<unsigned short>(bits)));
  return found;
}

// Wait at a named barrier for `num_threads` threads of the CTA, which are whole warps; it is not the barrier of the whole CTA.
__device__ inline void partial_barrier(int num_threads) { asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory"); }

__device__ inline int cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Wait for all threads of the cluster; what they wrote to shared memory is visible afterwards.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Return the address, in the CTA `rank` of the cluster, that corresponds to `pointer` in the shared memory of this one.
template <class T>
__device__ T* of_rank(T* pointer, int rank) {
  unsigned long long address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(pointer), "r"(rank));
  return reinterpret_cast<T*>(address);
}

// Wait until the previous launch has ended and its writes are visible, if this one may start earlier.
__device__ inline void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif
