// What Python calls: which instruction sets this processor has, teams of threads, packing, and running operations.

#include <algorithm>
#include <memory>

#include "../../worker/kernels/operations.h"

namespace baseline {
extern const paged::Instructions instructions;
}
#if defined(__x86_64__)
namespace avx2 {
extern const paged::Instructions instructions;
}
namespace avx512 {
extern const paged::Instructions instructions;
}
#endif

namespace paged {
namespace {

// From the slowest on; those that this processor has.
const std::vector<const Instructions*>& available() {
  static const std::vector<const Instructions*> all = [] {
    std::vector<const Instructions*> found{&baseline::instructions};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (wide) found.push_back(&avx2::instructions);
    if (wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
      found.push_back(&avx512::instructions);
#endif
    return found;
  }();
  return all;
}

struct Run {
  const Instructions* instructions;
  const Operation* const* operations;
  int64_t count;
  Shared* shared;
  Phase* phases;
  double* seconds;
};

void run_part(void* context, const Worker& worker) {
  const Run& it = *(const Run*)context;
  it.instructions->run(it.operations, it.count, *it.shared, it.phases, it.seconds, worker);
}

}  // namespace

int64_t packed_bytes(Format format, int64_t n, int64_t k) {  // as linear.inc lays them out
  const int64_t panels = (n + 15) / 16, groups = (k + 31) / 32;
  switch (format) {
    case FLOAT32: return panels * k * 16 * 4;
    case FLOAT16: return panels * k * 16 * 2;
    case BFLOAT16: return panels * ((k + 1) / 2 * 2) * 16 * 2;
    case INT8: return panels * ((groups * (16 * 32 + 32) + 63) / 64 * 64);
    case INT4: return panels * ((groups * (16 * 32 / 2 + 32) + 63) / 64 * 64);
  }
  return 0;
}

}  // namespace paged

using namespace paged;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT const char* paged_sources() { return PAGED_SOURCES; }
EXPORT int64_t paged_instruction_sets() { return (int64_t)available().size(); }
EXPORT const char* paged_instruction_set(int64_t i) { return available()[i]->name; }

EXPORT void* paged_team(int64_t threads) { return new Team((int)threads); }
EXPORT void paged_end_team(void* team) { delete (Team*)team; }

EXPORT int64_t paged_packed_bytes(int32_t format, int64_t n, int64_t k) { return packed_bytes((Format)format, n, k); }
EXPORT void paged_pack(int64_t set, int32_t format, const float* weight, int64_t n, int64_t k, void* packed) {
  available()[set]->pack((Format)format, weight, n, k, packed);
}

// Room that runs of one caller need; it grows, and is kept from step to step.
EXPORT void* paged_shared(int64_t groups) {
  auto* shared = new Shared();
  shared->plans.resize(groups);
  return shared;
}
EXPORT void paged_end_shared(void* shared) { delete (Shared*)shared; }

// seconds: [count] to which the time of each operation is added, or none.
EXPORT void paged_run(int64_t set, void* team_of, void* shared_of, const Operation* const* operations, int64_t count,
               const Frame* frame, int64_t share, double* seconds) {
  Team& team = *(Team*)team_of;
  Shared& shared = *(Shared*)shared_of;
  const std::lock_guard<std::mutex> turn(shared.one_run);
  const Instructions& instructions = *available()[set];
  shared.frame = frame;
  std::vector<bool> planned(shared.plans.size());
  for (int64_t i = 0; i < count; i++) {
    const Operation& op = *operations[i];
    if (op.kind == ATTENTION) {
      const auto& it = (const Attention&)op;
      AttentionPlan& plan = shared.plans[it.group];
      if (!planned[it.group])
        plan.make(frame->groups[it.group], it.call.pages.page_size, it.window, it.call.heads / it.call.pages.kv_heads, share);
      planned[it.group] = true;
      shared.room.fit(plan, it.call, team.count());
    } else if (op.kind == LINEAR) {
      const auto& it = (const Linear&)op;
      const int64_t bytes = instructions.prepared_bytes(it, op.few ? frame->sampled : frame->tokens);
      if ((int64_t)shared.prepared.size() < bytes) shared.prepared.resize(bytes);
    }
  }
  std::vector<Phase> phases(2 * count);
  Run run{&instructions, operations, count, &shared, phases.data(), seconds};
  team.run(run_part, &run);
}

}  // extern "C"
