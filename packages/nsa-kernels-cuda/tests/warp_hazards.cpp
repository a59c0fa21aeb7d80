// See warp_hazards.h. Compiled without -fsanitize=thread: accesses of these functions are not checked.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#define __SANITIZE_THREAD__ 1
#include "warp_hazards.h"

namespace hazards {
namespace {
constexpr int LANES = 32;
constexpr int WORD_BYTES = 4;
constexpr int SEVERAL = -1;  // lanes of one warp

struct Access {
  int warp, lane;
  unsigned clock;
};

struct Word {
  std::vector<Access> writes, reads;  // one write at most; reads since then, one for each warp
};

struct State {
  std::uintptr_t base = 0;
  std::size_t pitch = 0, shared_bytes = 0;
  std::vector<Word> words;                   // of all CTAs of the cluster
  std::vector<unsigned> clocks;              // of threads
  std::vector<std::vector<unsigned>> known;  // by warp: the clocks of the others whose accesses come before its own
  int running = -1;                          // the thread; -1 while none runs
  int count = 0;
  std::string first;
};

State state;

bool is_before(const Access& earlier, const Access& now) {
  if (earlier.warp != now.warp) return earlier.clock <= state.known[now.warp][earlier.warp];
  return earlier.clock < now.clock || earlier.lane == now.lane;
}

void check(const std::vector<Access>& earlier, const Access& now, std::size_t byte, const char* what) {
  for (const Access& each : earlier) {
    if (is_before(each, now) || state.count++ > 0) continue;
    char text[160];
    std::snprintf(text, sizeof text, "%s at byte %zu of CTA %zu: warp %d lane %d, then warp %d lane %d", what, byte % state.pitch,
                  byte / state.pitch, each.warp, each.lane, now.warp, now.lane);
    state.first = text;
  }
}

void access(const void* address, std::size_t num_bytes, bool is_write) {
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(address) - state.base;
  if (state.running < 0 || begin >= state.words.size() * WORD_BYTES || begin % state.pitch >= state.shared_bytes) return;
  const Access now = {state.running / LANES, state.running % LANES, state.clocks[state.running]};
  for (std::size_t byte = begin / WORD_BYTES * WORD_BYTES; byte < begin + num_bytes; byte += WORD_BYTES) {
    Word& word = state.words[byte / WORD_BYTES];
    check(word.writes, now, byte, is_write ? "write after write" : "read after write");
    if (is_write) {
      check(word.reads, now, byte, "write after read");
      word.writes.assign(1, now);
      word.reads.clear();
      continue;
    }
    const auto same = std::find_if(word.reads.begin(), word.reads.end(), [&](const Access& each) { return each.warp == now.warp; });
    if (same == word.reads.end()) {
      word.reads.push_back(now);
    } else if (same->clock < now.clock) {
      *same = now;
    } else if (same->lane != now.lane) {
      same->lane = SEVERAL;
    }
  }
}

}  // namespace

void run(int thread) { state.running = thread; }

void write(const void* address, std::size_t num_bytes) { access(address, num_bytes, true); }

void begin(const char* base, std::size_t pitch, std::size_t shared_bytes, int num_ranks, int num_threads) {
  state.base = reinterpret_cast<std::uintptr_t>(base);
  state.pitch = pitch;
  state.shared_bytes = shared_bytes;
  state.words.assign(pitch * num_ranks / WORD_BYTES, {});
  state.clocks.assign(num_threads, 1);
  state.known.assign(num_threads / LANES, std::vector<unsigned>(num_threads / LANES, 0));
}

void pass_syncwarp() { ++state.clocks[state.running]; }

void pass_barrier(const std::vector<int>& warps) {
  std::vector<unsigned> joined(state.known.size(), 0);
  for (int warp : warps) {
    std::transform(joined.begin(), joined.end(), state.known[warp].begin(), joined.begin(), [](unsigned a, unsigned b) { return std::max(a, b); });
    joined[warp] = std::max(joined[warp], state.clocks[warp * LANES]);
  }
  for (int warp : warps) {
    state.known[warp] = joined;
    for (int lane = 0; lane < LANES; ++lane) ++state.clocks[warp * LANES + lane];
  }
}

}  // namespace hazards

#define HAZARDS_ACCESS(bytes)                                                                      \
  void __tsan_read##bytes(void* address) { hazards::access(address, bytes, false); }               \
  void __tsan_write##bytes(void* address) { hazards::access(address, bytes, true); }               \
  void __tsan_unaligned_read##bytes(void* address) { hazards::access(address, bytes, false); }     \
  void __tsan_unaligned_write##bytes(void* address) { hazards::access(address, bytes, true); }
extern "C" {
HAZARDS_ACCESS(1)
HAZARDS_ACCESS(2)
HAZARDS_ACCESS(4)
HAZARDS_ACCESS(8)
HAZARDS_ACCESS(16)
void __tsan_init() {}
void __tsan_read_range(void* address, std::size_t num_bytes) { hazards::access(address, num_bytes, false); }
void __tsan_write_range(void* address, std::size_t num_bytes) { hazards::access(address, num_bytes, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Return the hazards found since the last call, and the first of them as text in `text`, of `size` bytes.
int take_hazards(char* text, int size) {
  std::snprintf(text, size, "%s", hazards::state.first.c_str());
  const int count = hazards::state.count;
  hazards::state.count = 0;
  hazards::state.first.clear();
  return count;
}
}
