// The kernels of decode.cu and decode_placed.cu on the host; compiled with `-include warp_emulator.h`.
#include "decode.cu"
#undef DECODE_KERNEL
#include "decode_placed.cu"

namespace {

// Call `kernel` with pointers and numbers in the order of its parameters; those of each type are taken one after another.
template <class... Parameters>
void run(void (*kernel)(Parameters...), emulator::Shape shape, void** pointers, const int* numbers) {
  const auto next = [&]<class P>() -> P {
    if constexpr (std::is_pointer_v<P>) {
      return static_cast<P>(*pointers++);
    } else {
      return *numbers++;
    }
  };
  // a list in braces is evaluated from left to right
  const std::tuple<Parameters...> arguments{next.template operator()<Parameters>()...};
  std::apply([&](Parameters... each) { emulator::launch(kernel, shape, each...); }, arguments);
}

}  // namespace

extern "C" void emulate_decode(const char* kernel, int num_ctas, int shared_bytes, int num_ranks, int backwards, void** p, const int* n) {
  const emulator::Shape shape = {{num_ctas, 1}, NUM_THREADS, static_cast<std::size_t>(shared_bytes), num_ranks, backwards != 0};
  const std::string_view name = kernel;
  if (name == "decode_bfloat16_128") return run(decode_bfloat16_128, shape, p, n);
  if (name == "decode_bfloat16_256") return run(decode_bfloat16_256, shape, p, n);
  if (name == "decode_float16_128") return run(decode_float16_128, shape, p, n);
  if (name == "decode_float16_256") return run(decode_float16_256, shape, p, n);
  if (name == "decode_bfloat16_128_placed") return run(decode_bfloat16_128_placed, shape, p, n);
  if (name == "decode_bfloat16_256_placed") return run(decode_bfloat16_256_placed, shape, p, n);
  if (name == "decode_float16_128_placed") return run(decode_float16_128_placed, shape, p, n);
  if (name == "decode_float16_256_placed") return run(decode_float16_256_placed, shape, p, n);
  emulator::fail("no such kernel");
}
