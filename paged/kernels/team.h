// A team of threads that stays: every step of a model is one call of `run`, in which its threads go through the same list
// of operations. The work of an operation is cut into pieces, and each piece is for whoever asks first.
//
// Nobody waits for a thread as such, only for pieces: a thread that a neighbour has pushed off its core, and that holds no
// piece, holds up nobody before the end of the run, and goes on where the others are once it is back. Who waits for a
// piece spins for some microseconds, longer than threads with equal work are apart, and sleeps after that; a pause between
// two steps costs nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paged {

// Pieces 0 to total - 1 of some work: how many have been taken, and how many are done.
struct alignas(64) Phase {
  std::atomic<uint32_t> taken{0};
  std::atomic<uint32_t> done{0};

  bool take(int64_t total, int64_t& piece) { return (piece = taken.fetch_add(1, std::memory_order_relaxed)) < total; }
  // Adds what this thread has done, and returns when all is done.
  void finish(uint32_t own, int64_t total);

  // Does pieces, until all are done: f(piece).
  template <class F> void each(int64_t total, F&& f) {
    uint32_t own = 0;
    for (int64_t piece; take(total, piece); own++) f(piece);
    finish(own, total);
  }
};

// What one thread knows while it runs.
struct Worker {
  int index;  // 0 is the thread that called `run`
  int count;
};

class Team {
 public:
  explicit Team(int count);  // as many threads as can be had, the caller's included
  ~Team();  // ends the threads; nothing may run
  Team(const Team&) = delete;

  int count() const { return count_; }
  // Calls task(context, worker) on this thread, and on those of the team that are there before it returns. Returns when
  // all that were called have returned.
  void run(void (*task)(void*, const Worker&), void* context);

 private:
  void serve(int index);

  const int count_;
  std::mutex one_run_;  // callers from several threads take turns
  std::mutex mutex_;    // guards the following
  void (*task_)(void*, const Worker&) = nullptr;  // none: nothing runs
  void* context_ = nullptr;
  int cpu_ = -1;  // where the caller was when its run began
  std::atomic<uint32_t> runs_{0};     // raised when one begins
  std::atomic<uint32_t> helpers_{0};  // threads inside of a task
  std::atomic<bool> ended_{false};
  std::vector<std::thread> threads_;
};

}  // namespace paged
