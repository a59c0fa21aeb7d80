// A decode step of one row of each sequence, over stores of contiguous rows in the dtype of q.
#include "decode.cuh"

#define DECODE_KERNEL(name, T, WIDTH)                                                       \
  extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) name(DECODE_PARAMETERS(T)) { \
    decode<T, WIDTH>(DECODE_OPERANDS, DECODE_PROBLEM, Contiguous{});                        \
  }

DECODE_KERNEL(decode_bfloat16_128, BFloat16, 128)
DECODE_KERNEL(decode_bfloat16_256, BFloat16, 256)
DECODE_KERNEL(decode_float16_128, Float16, 128)
DECODE_KERNEL(decode_float16_256, Float16, 256)
