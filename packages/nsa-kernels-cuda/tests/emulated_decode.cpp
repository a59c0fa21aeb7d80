// The kernels of decode.cu on the host; compiled with `-include warp_emulator.h`.
#include "decode.cu"

// What a launch takes, in the order of the kernel's parameters: 13 pointers, then numbers.
extern "C" void emulate_decode(const char* kernel, int num_ctas, int shared_bytes, int num_ranks, int backwards, void** p, const int* n) {
  const emulator::Shape shape = {{num_ctas, 1}, NUM_THREADS, static_cast<std::size_t>(shared_bytes), num_ranks, backwards != 0};
  const auto run = [&]<class T>(void (*function)(DECODE_PARAMETERS(T))) {
    const auto in = [&](int i) { return static_cast<const T*>(p[i]); };
    const auto numbers = [&](int i) { return static_cast<const int*>(p[i]); };
    emulator::launch(function, shape, in(0), in(1), in(2), in(3), in(4), in(5), in(6), p[7], numbers(8), numbers(9), numbers(10),
                     static_cast<T*>(p[11]), static_cast<int*>(p[12]), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11],
                     n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19], n[20], n[21]);
  };
  const std::string_view name = kernel;
  if (name == "decode_bfloat16_128") return run(decode_bfloat16_128);
  if (name == "decode_bfloat16_256") return run(decode_bfloat16_256);
  if (name == "decode_float16_128") return run(decode_float16_128);
  if (name == "decode_float16_256") return run(decode_float16_256);
  emulator::fail("no such kernel");
}
