// A decode step of any number of rows of each sequence, over stores that may have pages or be of FP8.
#include "decode.cuh"

// The fields of Placement::Rows of the three branches, pointers first; then the other fields of Placement.
#define PLACEMENT_PARAMETERS                                                                                                         \
  const int *cmp_table, const int *slc_table, const int *win_table, const float *k_slc_scale, const float *v_slc_scale,              \
      const float *k_win_scale, const float *v_win_scale, const int *cu_seqlens, int cmp_page_rows, int cmp_pages, int slc_page_rows, \
      int slc_pages, int win_page_rows, int win_pages, int num_sequences, int rows_per_sequence

#define DECODE_KERNEL(name, T, WIDTH)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) name(DECODE_PARAMETERS(T), PLACEMENT_PARAMETERS) {                          \
    decode<T, WIDTH>(DECODE_OPERANDS, DECODE_PROBLEM,                                                                                      \
                     Placement{{cmp_table, nullptr, nullptr, cmp_page_rows, cmp_pages},                                                    \
                               {slc_table, k_slc_scale, v_slc_scale, slc_page_rows, slc_pages},                                            \
                               {win_table, k_win_scale, v_win_scale, win_page_rows, win_pages}, cu_seqlens, num_sequences, rows_per_sequence}); \
  }

DECODE_KERNEL(decode_bfloat16_128_placed, BFloat16, 128)
DECODE_KERNEL(decode_bfloat16_256_placed, BFloat16, 256)
DECODE_KERNEL(decode_float16_128_placed, Float16, 128)
DECODE_KERNEL(decode_float16_256_placed, Float16, 256)
