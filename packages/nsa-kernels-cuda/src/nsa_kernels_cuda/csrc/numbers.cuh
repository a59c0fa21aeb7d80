// The dtypes that kernels read, as float32.
#pragma once

// Return -infinity.
__device__ inline float absent() { return __uint_as_float(0xFF800000u); }

__device__ inline float to_float(float x) { return x; }

struct BFloat16 {
  unsigned short bits;
};

__device__ inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

struct Float16 {
  unsigned short bits;
};

__device__ inline float to_float(Float16 x) {
  // float32's exponent bias is 112 above that of float16; the product is exact, subnormal numbers included
  const float magnitude = __uint_as_float((x.bits & 0x7FFFu) << 13) * 0x1p112f;
  const unsigned infinite_or_nan = (x.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  return __uint_as_float(__float_as_uint(magnitude) | infinite_or_nan | (x.bits & 0x8000u) << 16);
}

// The unit that a thread loads or stores.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T items[4];
};

struct Pair {
  float low, high;
};
