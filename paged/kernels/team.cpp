#include "team.h"

#include <system_error>

#if defined(__linux__)
#include <sched.h>
#endif

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

int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread to another CPU, if it may run on one. A thread that sleeps often is woken where it slept, and if that
// is where its caller runs, some systems leave both there for many milliseconds while another CPU is idle.
void leave_cpu([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t all;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof all, &all) || !CPU_ISSET(cpu, &all)) return;
  cpu_set_t others = all;
  CPU_CLR(cpu, &others);
  if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
  sched_setaffinity(0, sizeof all, &all);
#endif
}

// Returns a value for which `enough` holds.
template <class F> uint32_t wait_until(std::atomic<uint32_t>& value, F&& enough) {
  uint32_t now = value.load(std::memory_order_acquire);
  for (int i = 0; i < SPINS && !enough(now); i++) {
    pause();
    now = value.load(std::memory_order_acquire);
  }
  while (!enough(now)) {
    value.wait(now, std::memory_order_acquire);
    now = value.load(std::memory_order_acquire);
  }
  return now;
}

}  // namespace

void Phase::finish(uint32_t own, int64_t total) {
  if (own && done.fetch_add(own, std::memory_order_acq_rel) + own == (uint32_t)total) return done.notify_all();
  wait_until(done, [&](uint32_t now) { return now == (uint32_t)total; });
}

Team::Team(int count) : count_(count > 1 ? count : 1) {
  try {
    for (int i = 1; i < count_; i++) threads_.emplace_back([this, i] { serve(i); });
  } catch (const std::system_error&) {  // no more threads to be had: those that there are do the work
  }
}

Team::~Team() {
  ended_.store(true);
  runs_.fetch_add(1);
  runs_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*task)(void*, const Worker&), void* context) {
  std::lock_guard<std::mutex> turn(one_run_);
  if (count_ > 1) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      task_ = task;
      context_ = context;
      cpu_ = current_cpu();
    }
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
  }
  task(context, Worker{0, count_});
  if (count_ > 1) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      task_ = nullptr;  // who comes now is too late
    }
    wait_until(helpers_, [](uint32_t now) { return now == 0; });
  }
}

void Team::serve(int index) {
  uint32_t seen = 0;
  while (true) {
    seen = wait_until(runs_, [&](uint32_t now) { return now != seen; });
    if (ended_.load()) return;
    void (*task)(void*, const Worker&);
    void* context;
    int cpu;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      task = task_;
      context = context_;
      cpu = cpu_;
      if (task) helpers_.fetch_add(1, std::memory_order_relaxed);
    }
    if (!task) continue;
    if (cpu >= 0 && cpu == current_cpu()) leave_cpu(cpu);
    task(context, Worker{index, count_});
    if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1) helpers_.notify_all();
  }
}

}  // namespace paged
