#include "team.h"

namespace paged {
namespace {

constexpr int SPINS = 2000;  // 20 to 60 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < SPINS; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int count) : count_(count) {
  for (int i = 1; i < count; i++) threads_.emplace_back([this, i] { serve(i); });
}

Team::~Team() {
  ended_.store(true);
  runs_.fetch_add(1);
  runs_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*task)(void*, Worker&), void* context) {
  std::lock_guard<std::mutex> turn(one_run_);
  task_ = task;
  context_ = context;
  Worker self{this, 0, count_};
  if (count_ > 1) {
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
  }
  task(context, self);
  self.barrier();
}

void Team::serve(int index) {
  uint32_t seen = 0;
  while (true) {
    wait_while(runs_, seen);
    seen++;
    if (ended_.load()) return;
    Worker self{this, index, count_};
    task_(context_, self);
    self.barrier();
  }
}

void Team::barrier() {
  uint32_t before = barriers_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)count_) {
    arrived_.store(0, std::memory_order_relaxed);
    barriers_.fetch_add(1, std::memory_order_release);
    barriers_.notify_all();
  } else {
    wait_while(barriers_, before);
  }
}

}  // namespace paged
