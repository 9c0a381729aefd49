// All kernels for one instruction set: compiled once for each, with PAGED_ISA as the name of its namespace.

#include <chrono>
#include <limits>

#include "attention.inc"

#include "../../worker/kernels/norm.inc"
#include "../../worker/kernels/rotary.inc"
#include "../../worker/kernels/activation.inc"
#include "../../worker/kernels/lookup.inc"
#include "../../worker/kernels/linear.inc"
#include "../../worker/kernels/ceiling.inc"

namespace PAGED_ISA {

#define STRING(x) #x
#define NAME(x) STRING(x)

void run_one(const paged::Operation& op, paged::Shared& shared, paged::Phase* phases, const paged::Worker& worker) {
  const paged::Frame& frame = *shared.frame;
  const int64_t rows = op.few ? frame.sampled : frame.tokens;
  switch (op.kind) {
    case paged::EMBED: return embed((const paged::Embed&)op, frame, phases);
    case paged::NORM: return norm((const paged::Norm&)op, rows, phases);
    case paged::LINEAR: return linear((const paged::Linear&)op, rows, shared.prepared.data(), phases, worker);
    case paged::ROTARY: return rotary((const paged::Rotary&)op, frame, phases);
    case paged::ATTENTION: {
      const auto& it = (const paged::Attention&)op;
      return attention(it.call, shared.plans[it.group], shared.room, phases, worker);
    }
    case paged::GATHER: return gather((const paged::Gather&)op, frame, phases);
    case paged::ARGMAX: return argmax((const paged::Argmax&)op, rows, phases);
    case paged::WRITE: return write_kv((const paged::Write&)op, frame, phases);
    case paged::SOFT_CAP: return soft_cap((const paged::SoftCap&)op, rows, phases);
    case paged::MULTIPLY: return multiply((const paged::Multiply&)op, phases, worker);
  }
}

// One thread's way through the operations. phases: two for each, fresh. seconds: of each, added up, or none.
void run(const paged::Operation* const* operations, int64_t count, paged::Shared& shared, paged::Phase* phases,
         double* seconds, const paged::Worker& worker) {
  auto before = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; i++) {
    run_one(*operations[i], shared, phases + 2 * i, worker);
    if (seconds && worker.index == 0) {
      const auto now = std::chrono::steady_clock::now();
      seconds[i] += std::chrono::duration<double>(now - before).count();
      before = now;
    }
  }
}

extern const paged::Instructions instructions;
const paged::Instructions instructions = {NAME(PAGED_ISA), run, pack, prepared_bytes};

}  // namespace PAGED_ISA
