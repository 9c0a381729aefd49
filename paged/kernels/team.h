// A team of threads that stays: every step of a model is one call of `run`, in which all of them go through the same
// list of operations, with a barrier after each.
//
// Who waits spins for some microseconds, longer than two threads with equal work are apart, and sleeps after that: a
// core that a neighbour keeps busy then gets our other thread moved away from it, and a pause between two steps costs
// nothing. Work is claimed piece by piece, so a thread that was interrupted gets less of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paged {

class Team;

// What one thread knows while it runs.
struct Worker {
  Team* team;
  int index;  // 0 is the thread that called `run`
  int count;

  void barrier();
};

// Pieces 0 to total - 1, each for whoever asks first.
struct Counter {
  std::atomic<int64_t> next{0};
  int64_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }
};

class Team {
 public:
  explicit Team(int count);
  ~Team();  // ends the threads; nothing may run
  Team(const Team&) = delete;

  int count() const { return count_; }
  // Calls task(context, worker) on every thread of the team at once, and returns when all have returned.
  void run(void (*task)(void*, Worker&), void* context);

 private:
  friend struct Worker;
  void barrier();
  void serve(int index);

  int count_;
  std::mutex one_run_;  // callers from several threads take turns
  void (*task_)(void*, Worker&) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint32_t> runs_{0};  // raised when one begins
  std::atomic<uint32_t> arrived_{0};
  std::atomic<uint32_t> barriers_{0};  // raised when one has been passed
  std::atomic<bool> ended_{false};
  std::vector<std::thread> threads_;
};

inline void Worker::barrier() {
  if (count > 1) team->barrier();
}

}  // namespace paged
