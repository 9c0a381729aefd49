// A step of a model as a list of operations on float32 buffers: what Python builds (worker/kernels/native.py has the same
// fields in the same order) and the team of threads goes through, one operation after another.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "../../paged/kernels/attention.h"

namespace paged {

enum Kind : int32_t { EMBED, NORM, LINEAR, ROTARY, ATTENTION, GATHER, ARGMAX, WRITE, MULTIPLY, SOFT_CAP };
enum Input : int32_t { PLAIN = 0, NORMED = 1, SILU = 2, GELU_TANH = 3 };  // what a linear makes of x first

// What changes from step to step.
struct Frame {
  int64_t tokens;
  const int64_t* token_ids;    // [tokens]
  const int64_t* positions;    // [tokens]
  int64_t sampled;             // rows that the operations after GATHER have
  const int64_t* sampled_rows; // [sampled] on the flat axis
  const Sequences* groups;     // of each group of layers
  const int64_t* const* slots; // of each group, [tokens]
};

// Every operation begins with its kind; `few` says that its rows are the sampled ones and not all tokens.
struct Operation {
  int32_t kind, few;
};

struct Embed : Operation {  // out [tokens, n] = table[token] * scale
  const void* table;        // [vocabulary, n] in format
  float* out;
  int64_t n;
  int32_t format;
  float scale;
};

struct Norm : Operation {  // out += x / sqrt(mean(x^2) + eps) * weight
  const float* x;          // [rows, n]
  const float* weight;     // [n]
  float* out;              // [rows, n]
  int64_t n;
  float eps;
};

// out = (y W^T + bias) * scale; or out += that. y: x; or x / sqrt(mean(x^2) + eps) * norm; or f(gate) * up of x = (gate, up).
struct Linear : Operation {
  const float* x;            // [rows, k], with gates [rows, 2 * k]
  const void* weight;        // W [n, k], packed (linear.inc)
  float* out;                // [rows, n]
  int64_t n, k;
  int32_t format, add, input;
  float eps;
  const float* norm;  // [k], or none
  const float* bias;  // [n], or none
  float scale;
};

struct Rotary : Operation {  // rotates q in place; rotates k and writes it, and v, to the slots
  float* qkv;                // [tokens, (heads + 2 * kv_heads) * head_dim]
  const float* cos;          // [positions, half]
  const float* sin;
  const float* q_norm;  // [head_dim]; with norm_all [heads * head_dim]; or none
  const float* k_norm;
  Pages pages;
  int64_t heads, group;
  int64_t half;  // pairs of a head that are rotated, the first ones
  int32_t norm_all;
  float eps;
};

struct Attention : Operation {
  AttentionCall call;
  int64_t group, window;
};

struct Gather : Operation {  // the sampled rows
  const float* x;            // [tokens, n]
  float* out;                // [sampled, n]
  int64_t n;
};

struct Argmax : Operation {  // of equals the first
  const float* x;            // [rows, n]
  int64_t* out;              // [rows]
  int64_t n;
};

struct SoftCap : Operation {  // x = cap * tanh(x / cap)
  float* x;                  // [rows, n]
  int64_t n;
  float cap;
};

struct Write : Operation {  // k and v [tokens, kv_heads * head_dim] to the slots
  const float* k;
  const float* v;
  Pages pages;
  int64_t group;
};

struct Multiplied {
  int64_t operations;
  float result;
};

struct Multiply : Operation {  // multiplies and adds on every thread, on registers alone
  int64_t repeats;
  int32_t format;
  float value;
  Multiplied* done;  // [threads]: operations, two in a multiply-add, and what came out
};

// What the operations of one run share.
struct Shared {
  std::mutex one_run;  // callers from several threads take turns
  const Frame* frame;
  std::vector<AttentionPlan> plans;  // of each group
  AttentionRoom room;
  std::vector<char> prepared;  // the rows of a linear, as its format takes them
};

struct Instructions {  // what one instruction set offers
  const char* name;
  void (*run)(const Operation* const* operations, int64_t count, Shared& shared, Phase* phases, double* seconds,
              const Worker& worker);
  void (*pack)(Format format, const float* weight, int64_t n, int64_t k, void* packed);
  int64_t (*prepared_bytes)(const Linear& op, int64_t rows);
};

int64_t packed_bytes(Format format, int64_t n, int64_t k);

}  // namespace paged
